"""An engine whose packets are made with all that an adapter can hold."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from training_samples import SMALL, VARIANTS, chat, touched

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.training.recipe import Recipe

PROMPT = chat("Who signed the lease?", CHUNKS[:3])


def _engine(backbone: Backbone, name: str) -> KVPacketEngine:
    return KVPacketEngine(backbone, adapter=touched(Recipe(**(SMALL | VARIANTS[name])), backbone), min_match_tokens=4)


@pytest.mark.parametrize("name", VARIANTS)
def test_packets_hold_the_chunk_and_the_soft_tokens_that_stay(name: str, backbone: Backbone) -> None:
    engine = _engine(backbone, name)
    (packet_id,) = engine.encode(CHUNKS[:1])
    packet = engine.store.get(packet_id, engine.signature)
    length = len(backbone.token_ids(CHUNKS[0]))
    assert packet.num_tokens == length
    assert packet.span == packet.tensors[0].shape[2] == length + engine.encoder.adapter.stored_tokens


@pytest.mark.parametrize("name", ["all", "header left out"])
def test_full_prefill_is_the_bare_model_under_any_adapter(name: str, backbone: Backbone) -> None:
    engine, bare = _engine(backbone, name), KVPacketEngine(backbone)
    engine.encode(CHUNKS[:3])
    assert engine.generate(PROMPT, policy="prefill").token_ids == bare.generate(PROMPT, policy="prefill").token_ids


def test_answers_given_while_chunks_are_encoded_are_not_touched_by_the_update(backbone: Backbone) -> None:
    engine = _engine(backbone, "all")
    engine.encode(CHUNKS[:3])
    expected = engine.generate(PROMPT).token_ids
    found: list[Any] = []
    stop = threading.Event()

    def encode() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            engine.encode([f"Note {number}. {CHUNKS[number % 4]}"])

    worker = threading.Thread(target=encode)
    worker.start()
    found = [engine.generate(PROMPT).token_ids for _ in range(6)]
    stop.set()
    worker.join()
    assert found == [expected] * 6


def test_packets_of_another_update_are_not_found(backbone: Backbone) -> None:
    first, second = _engine(backbone, "low rank"), _engine(backbone, "low rank")
    with torch.no_grad():
        second.encoder.adapter.low_rank.up[0].add_(1)
    other = KVPacketEngine(backbone, adapter=Adapter(**_parts(second.encoder.adapter)))
    assert first.encode(CHUNKS[:1]) != other.encode(CHUNKS[:1])


def _parts(adapter: Adapter) -> dict[str, Any]:
    return {"header": adapter.header, "trailer": adapter.trailer, "low_rank": adapter.low_rank}
