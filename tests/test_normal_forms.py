"""Tokenizers that compose accents: both normal forms of a chunk have its tokens, and its packet."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CHUNKS
from tokenizers import normalizers

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.finder import ChunkFinder
from kvpacket_rag.reading import Reuse

COMPOSED = "Šárka and the naïve café façade of Ångström are all closed on every Sunday in winter."
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
SHORT = GenerationSettings(max_new_tokens=8)


@pytest.fixture
def composing(make_model: Callable[..., Any], tokenizer: Any) -> KVPacketEngine:
    """An engine whose tokenizer composes, as Qwen's does."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return KVPacketEngine(Backbone(make_model(), tokenizer, "tiny"), min_match_tokens=4)


def ask(*chunks: str) -> list[Message]:
    return [Message("user", "\n\n".join([*chunks, "What is closed?"]))]


@pytest.mark.parametrize("stored", [COMPOSED, DECOMPOSED])
def test_a_chunk_is_found_in_both_forms_and_answered_alike(composing: KVPacketEngine, stored: str):
    (name,) = composing.encode([stored])
    strict = Reuse(hints=(name,), on_miss="error")
    answers = [composing.generate(ask(text), SHORT, reuse=strict) for text in (COMPOSED, DECOMPOSED)]
    assert [answer.usage.chunks_reused for answer in answers] == [1, 1]
    assert answers[0].token_ids == answers[1].token_ids
    assert composing.encode([COMPOSED, DECOMPOSED]) == [name, name] and len(composing.store) == 1


def test_a_chunk_stored_again_in_the_other_form_is_found_by_the_same_engine(composing: KVPacketEngine):
    composing.encode([COMPOSED], ["a"])
    assert composing.generate(ask(COMPOSED), SHORT).usage.chunks_reused == 1
    composing.drop_owners(["a"])
    assert composing.generate(ask(DECOMPOSED), SHORT).usage.chunks_reused == 0
    composing.encode([DECOMPOSED], ["b"])
    assert composing.generate(ask(DECOMPOSED), SHORT).usage.chunks_reused == 1


def test_elsewhere_the_forms_are_two_chunks(engine: KVPacketEngine):
    names = engine.encode([COMPOSED, DECOMPOSED])
    found = engine.generate(ask(DECOMPOSED, COMPOSED), SHORT)
    assert names[0] != names[1] and found.packet_ids == (names[1], names[0])


def test_a_chunk_that_is_reused_is_no_miss_where_it_stands_in_another_form_too(engine: KVPacketEngine):
    (name,) = engine.encode([COMPOSED])
    history = [*ask("Where?"), Message("assistant", f"It says: {DECOMPOSED}"), *ask(COMPOSED)]
    usage = engine.generate(history, SHORT, reuse=Reuse(hints=(name,), on_miss="error")).usage
    assert usage.chunks_reused == 1 and not usage.misses


def test_a_finder_of_one_form_forgets_every_form(engine: KVPacketEngine):
    finder = ChunkFinder(forms_are_one=True)
    for name, text in (("a", COMPOSED), ("b", DECOMPOSED), ("c", CHUNKS[0])):
        finder.add(name, text)
    finder.discard("a")
    assert [match.packet_id for match in finder.find(f"{COMPOSED} {DECOMPOSED} {CHUNKS[0]}")] == ["b", "b", "c"]
    finder.discard("b")
    assert [match.packet_id for match in finder.find(f"{COMPOSED} {DECOMPOSED} {CHUNKS[0]}")] == ["c"]
    assert not finder.only(["c"]).near_misses(DECOMPOSED)
