"""Training and evaluation cut a prompt as serving does."""

from __future__ import annotations

import pytest
from conftest import CHUNKS
from training_samples import chat

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.parts import absorb, parts_of

SHORT = "Ada."


@pytest.mark.parametrize("chunks", [CHUNKS[:3], [CHUNKS[0], SHORT, CHUNKS[1]], [CHUNKS[0], CHUNKS[0], CHUNKS[1]]])
def test_parts_are_those_of_an_engine_that_knows_the_chunks(chunks: list[str], backbone: Backbone) -> None:
    engine = KVPacketEngine(backbone)
    engine.encode(chunks)
    prompt = chat("Who is Ada.", chunks)
    served, _ = engine._reader.read(prompt, None)
    found = parts_of(engine.encoder, prompt, chunks)
    assert [(p.packet_id, p.text) for p in found] == [(p.packet_id, p.text) for p in served]
    assert all(part.ids for part in found)


def test_only_white_space_between_two_chunks_is_absorbed(backbone: Backbone) -> None:
    engine = KVPacketEngine(backbone)
    parts = parts_of(engine.encoder, chat("Who?", CHUNKS[:3]), CHUNKS[:3])
    gone = [part.text for part in parts if part not in absorb(parts)]
    assert gone == ["\n\n"] and "\nTitle: last\n" in [part.text for part in absorb(parts)]
