"""Prompts for a vLLM that serves packets: from messages to token ids, packet ids and salt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpacket_rag.answer import Miss
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import ContextTooLongError
from kvpacket_rag.packet import Packet, packet_id
from kvpacket_rag.parts import Part
from kvpacket_rag.reading import Prompt, PromptReader, Reuse
from kvpacket_rag.serving.vllm_card import ServingCard
from kvpacket_rag.serving.vllm_layout import Claim, Named, soft_prompt

_BEHIND_TEXT = (
    "it stands behind text that the model has to read, and vLLM takes packets only as one prefix; keep chunks "
    "together, with nothing but white space between them"
)
_AT_THE_END = "the prompt ends with this chunk, so it has to be read for the next token"


@dataclass(frozen=True, slots=True)
class VLLMPrompt:
    """A prompt as vLLM takes it.

    Attributes:
        token_ids: of the whole prompt, with placeholders where packets have soft tokens.
        packet_tokens: positions that come from packets, the preamble's included.
        claim: which packets; None if none could be used.
        misses: chunks that are read as text, with the reason.
    """

    token_ids: tuple[int, ...]
    packet_tokens: int
    claim: Claim | None
    misses: tuple[Miss, ...]

    @property
    def cache_salt(self) -> str | None:
        """Keeps vLLM from taking these blocks for another prompt's."""
        return self.claim.salt if self.claim else None

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """For ``SamplingParams(extra_args={"kv_transfer_params": …})``."""
        return self.claim.as_params() if self.claim else None

    def body(self) -> dict[str, Any]:
        """Fields of a request to ``/v1/completions``; add model, max_tokens and whatever else."""
        body: dict[str, Any] = {"prompt": list(self.token_ids)}
        if self.claim:
            body |= {"cache_salt": self.cache_salt, "kv_transfer_params": self.kv_transfer_params}
        return body


class VLLMPrompter:
    """Cuts prompts for a vLLM whose connector reads an engine's store, and sees to it that the packets are there.

    The text before the first chunk becomes a packet of its own. White space alone between two chunks is left out,
    whatever the adapter. Chunks behind any other text are read by vLLM, and told of as misses.

    Preambles have no owner in the store: under a byte cap those that are not used any more make room.

    Args:
        engine: whose store vLLM reads; that has to be a folder.
    """

    def __init__(self, engine: KVPacketEngine) -> None:
        self._engine = engine
        self._reader = PromptReader(engine.backbone, engine.store, engine.signature, engine.min_match_tokens)
        self.card = ServingCard.of(engine)

    def prompt(
        self,
        prompt: Prompt,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reuse: Reuse | None = None,
    ) -> VLLMPrompt:
        """Cut one prompt; packets that are missing are encoded.

        Args:
            prompt: chat messages or a final text; see :meth:`KVPacketEngine.stream`.
            template_kwargs: for the chat template.
            reuse: which chunks may come from packets and what a miss does.

        Raises:
            PromptError: the prompt is empty or malformed.
            PacketMissError: a chunk cannot be reused, and ``reuse`` wants that to be an error.
            ContextTooLongError: the prompt leaves no room for an answer.
            StoreError: the store cannot be written.
        """
        reuse = Reuse() if reuse is None else reuse
        self._engine.backbone.check_unchanged()
        parts, misses = self._reader.read(prompt, template_kwargs, reuse)
        preamble, chunks, rest, late = _divide(parts)
        reuse.act_on(misses := misses + late)
        ids = [token for part in preamble for token in self._ids(part)]
        claim, packet_tokens = None, 0
        if chunks:
            head = self._preamble(ids, preamble) if ids else None
            packets = tuple(self._chunk(part) for part in chunks)
            claim = Claim(self.card.signature.digest, head, packets)
            ids += [token for part in chunks for token in soft_prompt(self._ids(part), self.card)]
            packet_tokens = len(ids)
        ids += [token for part in rest for token in self._ids(part)]
        if len(ids) >= self._engine.context_window:
            raise ContextTooLongError(
                f"the prompt takes {len(ids)} positions and {self._engine.model_name} has "
                f"{self._engine.context_window}; retrieve fewer or shorter chunks"
            )
        return VLLMPrompt(tuple(ids), packet_tokens, claim, misses)

    def _ids(self, part: Part) -> list[int]:
        if part.ids is None:
            part.ids = self._engine.token_ids(part.text)
        return part.ids

    def _chunk(self, part: Part) -> Named:
        """A chunk's packet, encoded if it is not stored any more."""
        name, ids, engine = str(part.packet_id), self._ids(part), self._engine
        if name not in engine.store:
            for packet in engine.encoder.encode([(name, ids)]):
                engine.store.put(packet, part.text, only_known=True)
        return Named(name, len(ids))

    def _preamble(self, ids: list[int], parts: Sequence[Part]) -> Named:
        """The packet of the text before the first chunk: no adapter, position 0, exact."""
        signature, engine = self.card.preamble_signature, self._engine
        name = packet_id(ids, signature)
        if name not in engine.store:
            (tensors,) = engine.backbone.encode([torch.tensor(ids)])
            text = "".join(part.text for part in parts)
            engine.store.put(Packet(name, signature, tensors, len(ids), len(ids)), text)
        return Named(name, len(ids))


def _divide(parts: Sequence[Part]) -> tuple[list[Part], list[Part], list[Part], tuple[Miss, ...]]:
    """Text before the first chunk, chunks with nothing but white space between them, the rest, and what that misses."""
    first = next((number for number, part in enumerate(parts) if part.packet_id), len(parts))
    chunks: list[Part] = []
    stop = first
    for number, part in enumerate(parts[first:-1], start=first):  # the last part is read, for the next token
        if part.packet_id:
            chunks.append(part)
            stop = number + 1
        elif not part.text.isspace():
            break
    rest = list(parts[stop:])
    late = [part.packet_id for part in rest if part.packet_id]
    ends = bool(late) and rest[-1].packet_id is not None
    reasons = [_BEHIND_TEXT] * (len(late) - ends) + [_AT_THE_END] * ends
    misses = tuple(Miss(name, reason) for name, reason in zip(late, reasons, strict=True))
    return list(parts[:first]), chunks, rest, misses
