"""Requests as vLLM hands them to a connector, and a paged cache to load packets into, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from conftest import CHUNKS
from torch import Tensor

from kvpacket_rag.chat import Message
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.serving.vllm_layout import PlacedPacket, prove
from kvpacket_rag.serving.vllm_load import Load, PacketLoader
from kvpacket_rag.serving.vllm_prompt import VLLMPrompt, VLLMPrompter

BLOCK = 16
SCATTERED = (7, 2, 9, 4, 11, 1, 5, 8, 3, 10, 6, 0)  # blocks of a request are nowhere in a row
SCALED = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
}


def prompter_of(engine: KVPacketEngine) -> VLLMPrompter:
    """Of an engine that knows all chunks."""
    engine.encode(CHUNKS)
    return VLLMPrompter(engine)


def messages(chunks: list[str], question: str = "Who signed it?", joint: str = "\n\n") -> list[Message]:
    """A chat that holds chunks."""
    return [Message("system", "Be brief."), Message("user", f"{joint.join(chunks)}\n\nQuestion: {question}")]


def placed_of(prompter: VLLMPrompter, prompt: VLLMPrompt) -> tuple[PlacedPacket, ...]:
    """Where the packets of a prompt stand."""
    assert prompt.claim
    return prove(prompt.claim, prompter.card, prompt.token_ids, prompt.cache_salt)


def request(prompt: VLLMPrompt, request_id: str = "r", **changed: Any) -> Any:
    """With the attributes of vLLM's Request that admission reads."""
    made: dict[str, Any] = {
        "request_id": request_id,
        "kv_transfer_params": prompt.kv_transfer_params,
        "cache_salt": prompt.cache_salt,
        "prompt_token_ids": list(prompt.token_ids),
        "num_tokens": len(prompt.token_ids),
        "lora_request": None,
        "sampling_params": SimpleNamespace(
            prompt_logprobs=None, prompt_logprob_token_ids=None, skip_reading_prefix_cache=False
        ),
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**(made | changed))


def bypassing(**sampling: Any) -> Any:
    """Sampling parameters with one that has vLLM compute the prompt itself."""
    plain = {"prompt_logprobs": None, "prompt_logprob_token_ids": None, "skip_reading_prefix_cache": False}
    return SimpleNamespace(**(plain | sampling))


@dataclass
class PagedCache:
    """Keys and values by slot; rows nobody wrote are NaN."""

    engine: KVPacketEngine
    blocks: tuple[int, ...]
    rows: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.engine.backbone.model.config
        shape = ((max(self.blocks) + 1) * BLOCK, config.num_key_value_heads, config.head_dim)
        for layer in range(config.num_hidden_layers):
            self.rows[layer] = {name: torch.full(shape, torch.nan) for name in ("keys", "values")}

    def _writer(self, layer: int) -> Any:
        def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
            self.rows[layer]["keys"][slots] = keys
            self.rows[layer]["values"][slots] = values

        return write

    def loader(self) -> PacketLoader:
        """A loader that writes into this cache."""
        writers = {layer: self._writer(layer) for layer in self.rows}
        backbone = self.engine.backbone
        return PacketLoader(self.engine.store, backbone.plan, writers, BLOCK, backbone.dtype, backbone.device)

    def load(self, placed: Any, start: int = 0) -> None:
        """Write packets from position ``start`` on."""
        self.loader().load(Load("r", tuple(placed), start, self.blocks, in_background=False))

    def at(self, layer: int, name: str, start: int, stop: int) -> Tensor:
        """(heads, tokens, width) of some positions, found by the definition of a block table."""
        slots = [self.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, stop)]
        return self.rows[layer][name][slots].transpose(0, 1)
