"""Tiny random models and a tiny tokenizer, made here in a moment, so that tests need no download."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHUNKS = [
    "The cold room on the second floor is kept at minus twenty degrees and opened twice a day by the night shift.",
    "Ada Marlow signed the lease of the harbour office in March 2021 for a term of seven years and four months.",
    "Refunds are paid within nine working days to the card that was charged, never in cash and never as credit.",
    "The controller shows error E41 when the door sensor has been silent for more than ninety seconds in a row.",
]


@pytest.fixture(autouse=True)
def _no_documents_of_other_tests() -> None:
    """What retrievers of the frameworks found is known to the whole process."""
    for framework in ("langchain", "llama_index"):
        if module := sys.modules.get(f"{framework}_kvpacket.retrieved"):
            module.RETRIEVED.clear()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences, with ChatML control tokens and template; puts no token before a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CHUNKS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def tiny_model(
    config_class: type = LlamaConfig, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """A random model of a few thousand weights; every keyword goes into its config."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    model = AutoModelForCausalLM.from_config(config_class(**(common | settings)), dtype=dtype).eval()
    for parameter in model.parameters():  # wider than the default draw, so that positions and order matter
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """Makes random models of a few thousand weights."""
    return tiny_model


@pytest.fixture(scope="session")
def backbone(make_model: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> Backbone:
    """A tiny random Llama."""
    return Backbone(make_model(), tokenizer, "tiny")


@pytest.fixture(scope="session")
def adapter(backbone: Backbone) -> Adapter:
    """Three soft tokens before and two behind a chunk."""
    return Adapter.random(backbone.embed(range(500)), 3, 2, seed=1)


@pytest.fixture
def engine(backbone: Backbone) -> KVPacketEngine:
    """The tiny model over an empty store in memory, without adapter."""
    return KVPacketEngine(backbone, min_match_tokens=4)


@pytest.fixture
def soft_engine(backbone: Backbone, adapter: Adapter) -> KVPacketEngine:
    """The same with soft tokens."""
    return KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4)


@pytest.fixture
def prompter(engine: KVPacketEngine) -> Any:
    """Makes prompts for vLLM, of packets without soft tokens."""
    from vllm_samples import prompter_of

    return prompter_of(engine)


@pytest.fixture
def soft_prompter(soft_engine: KVPacketEngine) -> Any:
    """The same, of packets with them."""
    from vllm_samples import prompter_of

    return prompter_of(soft_engine)
