"""From how many tokens of chunks on packets give the first token sooner than reading the same text."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.packet import packet_id
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefiller
from kvpacket_rag.store import DiskStore, MemoryStore, PacketStore

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
_REPEATS = 3
_PREAMBLE, _QUESTION = 12, 24  # tokens around the chunk


def measure_break_even(backbone: Backbone, encoder: PacketEncoder, on_disk: bool) -> int:
    """Measure both ways on this model and device, shortest chunk first.

    Takes about a second for small models on a CPU. Nothing is written into a user's store.

    Args:
        backbone: the model.
        encoder: of the packets.
        on_disk: packets are read from disk, as those of the store they will be used with.

    Returns:
        The shortest measured length, in tokens, at which packets are quicker; the context window if none is.
    """
    longest = backbone.context_window - encoder.adapter.num_tokens - len(encoder.sink_ids) - _PREAMBLE - _QUESTION
    with _store(on_disk) as store:
        prefiller = Prefiller(backbone, encoder, store)
        for tokens in (length for length in _LENGTHS if length < longest):
            chunks = [_tokens(backbone, tokens, seed) for seed in range(_REPEATS)]
            names = [packet_id(ids, encoder.signature) for ids in chunks]
            for packet in encoder.encode(list(zip(names, chunks, strict=True))):
                store.put(packet, packet.packet_id)
            packets = [_prompt(backbone, ids, name) for ids, name in zip(chunks, names, strict=True)]
            text = [_prompt(backbone, ids, None) for ids in chunks]
            if _seconds(backbone, prefiller, packets) < _seconds(backbone, prefiller, text):
                return tokens
    return backbone.context_window


@contextmanager
def _store(on_disk: bool) -> Iterator[PacketStore]:
    if not on_disk:
        yield MemoryStore()
        return
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder)
        try:
            yield store
        finally:
            store.close()


def _tokens(backbone: Backbone, number: int, seed: int) -> list[int]:
    size = backbone.model.get_input_embeddings().num_embeddings
    return torch.randint(int(size), (number,), generator=torch.Generator().manual_seed(seed)).tolist()


def _prompt(backbone: Backbone, chunk: list[int], name: str | None) -> list[Part]:
    before, after = _tokens(backbone, _PREAMBLE, 100), _tokens(backbone, _QUESTION, 101)
    return [Part.of_text(before), Part("", len(chunk), name, chunk), Part.of_text(after)]


def _seconds(backbone: Backbone, prefiller: Prefiller, prompts: list[list[Part]]) -> float:
    """Of the quickest prompt, so that a busy moment does not decide; the first one only warms up."""
    return min([_first_token(backbone, prefiller, parts) for parts in prompts][1:])


def _first_token(backbone: Backbone, prefiller: Prefiller, parts: list[Part]) -> float:
    started = time.perf_counter()
    filled = prefiller.run(parts, 1)
    filled.logits.argmax().item()  # waits for the device
    backbone.pool.give_back(filled.context)
    return time.perf_counter() - started
