"""Text before the first packet: what of it is kept from earlier prompts, and that it makes no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CHUNKS

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.preamble import pieces

LONG = " ".join(f"Rule {n}: answer from what is written below and never from anything else." for n in range(40))
SHORT = GenerationSettings(max_new_tokens=8)


def prompt(source: str, head: str = LONG) -> str:
    return f"{head}\nsource: {source}\n\n{CHUNKS[1]}\n\nWho signed the lease?"


@pytest.fixture
def make(backbone: Backbone, adapter: Adapter) -> Callable[[], KVPacketEngine]:
    def made() -> KVPacketEngine:
        engine = KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4)
        engine.encode(CHUNKS)
        return engine

    return made


@pytest.mark.parametrize("end", [0, 1, 31, 32, 33, 256, 257, 512, 700])
def test_pieces_cover_a_preamble_and_end_at_the_same_places_however_it_goes_on(end: int):
    whole = list(pieces(0, end))
    assert [place for start, stop in whole for place in range(start, stop)] == list(range(end))
    further = [stop for _, stop in pieces(0, 2000)]
    assert all(stop in further for _, stop in whole[:-1])
    assert all(list(pieces(start, end)) == whole[number:] for number, (start, _) in enumerate(whole))


def test_the_beginning_that_prompts_have_in_common_is_read_once(make: Callable[[], KVPacketEngine]):
    engine = make()
    sources = ("/a/lease.txt", "/b/rules.txt", "/a/lease.txt")
    first, other, again = (engine.generate(prompt(source), SHORT).usage for source in sources)
    head = engine.count_tokens(LONG)
    assert first.preamble_tokens == 0 and head > 512
    assert head - 256 < other.preamble_tokens <= head < again.preamble_tokens
    assert again.prefilled_tokens < other.prefilled_tokens < first.prefilled_tokens


@pytest.mark.parametrize("head", [LONG, LONG[:300], "Rule 0:", ""])
def test_a_prompt_is_computed_to_the_bit_as_without_the_earlier_ones(
    make: Callable[[], KVPacketEngine], backbone: Backbone, monkeypatch: pytest.MonkeyPatch, head: str
):
    forwards: list[list[int]] = []
    prefill = backbone.prefill

    def noting(bound: Any, texts: Any) -> Any:
        forwards.append([len(ids) for _, ids in texts])
        return prefill(bound, texts)

    def read(engine: KVPacketEngine, source: str) -> tuple[Any, list[list[int]]]:
        backbone.pool.drop_idle()  # contexts that earlier prompts filled
        forwards.clear()
        parts = engine._tasks.read(prompt(source, head), SHORT, None, 0, None).parts
        return engine._prefiller.run(parts, 8).logits, [*forwards]

    monkeypatch.setattr(backbone, "prefill", noting)
    warm = make()
    for source in ("/a", "/b/x", "/c/lease and more of it", "/b/x"):
        (logits, last), (expected, whole) = read(warm, source), read(make(), source)
        assert torch.equal(logits, expected) and whole[-len(last) :] == last  # forwards of other sizes round otherwise


def test_another_beginning_shares_nothing(make: Callable[[], KVPacketEngine]):
    engine = make()
    engine.generate(prompt("/a"), SHORT)
    assert engine.generate(prompt("/a", "One. " + LONG), SHORT).usage.preamble_tokens == 0
