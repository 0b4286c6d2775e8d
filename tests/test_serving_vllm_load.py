"""What of packets is written into a paged cache, and where; nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conftest import CHUNKS
from reference import own_layers
from test_package import modules_after
from torch.testing import assert_close
from vllm_samples import BLOCK, SCALED, SCATTERED, PagedCache, messages, placed_of, prompter_of

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import PacketMismatchError, PacketNotFoundError, UnsupportedModelError
from kvpacket_rag.serving.vllm_load import Load, Step, Work
from kvpacket_rag.serving.vllm_prompt import VLLMPrompter


@pytest.fixture
def prompter(engine: KVPacketEngine) -> VLLMPrompter:
    return prompter_of(engine)


@pytest.mark.parametrize("scaling", SCALED)
def test_written_keys_and_values_are_the_models_own_at_those_positions(
    scaling: str, make_model: Callable[..., Any], tokenizer: Any
):
    rope = {"rope_parameters": SCALED[scaling]} if SCALED[scaling] else {}
    engine = KVPacketEngine(Backbone(make_model(**rope), tokenizer, "tiny"), min_match_tokens=4)
    prompter = prompter_of(engine)
    placed = placed_of(prompter, prompt := prompter.prompt(messages(CHUNKS[:3])))
    cache = PagedCache(engine, SCATTERED)
    cache.load(placed)
    assert [p.stop for p in placed[:-1]] == [p.start for p in placed[1:]] and placed[-1].stop == prompt.packet_tokens
    for packet in placed:
        ids = prompt.token_ids[packet.start : packet.stop]
        for number, layer in enumerate(own_layers(engine.backbone.model, ids, packet.start)):
            for name in ("keys", "values"):
                found = cache.at(number, name, packet.start, packet.stop)
                assert_close(found, getattr(layer, name)[0], atol=2e-5, rtol=1e-4)  # float32


def test_only_what_the_cache_lacks_is_written_and_nothing_behind_the_packets(
    engine: KVPacketEngine, prompter: VLLMPrompter
):
    placed = placed_of(prompter, prompter.prompt(messages(CHUNKS[:3])))
    whole, rest = PagedCache(engine, SCATTERED), PagedCache(engine, SCATTERED)
    start, stop = placed[1].start + 7, placed[-1].stop
    whole.load(placed)
    rest.load(placed, start)
    assert_close(rest.at(1, "keys", start, stop), whole.at(1, "keys", start, stop), atol=0, rtol=0)
    for cache, first in ((whole, 0), (rest, start)):
        assert int(cache.rows[2]["values"][:, 0, 0].isfinite().sum()) == stop - first


def test_soft_tokens_and_quantised_packets_are_written_as_a_context_of_our_own_has_them(backbone: Any, adapter: Any):
    engine = KVPacketEngine(backbone, adapter=adapter, min_match_tokens=4, reduction=Reduction.of(None, "int8"))
    prompter = prompter_of(engine)
    placed = placed_of(prompter, prompter.prompt(CHUNKS[0] + CHUNKS[1] + " Who?"))
    cache = PagedCache(engine, SCATTERED)
    cache.load(placed)
    context = backbone.pool.take(placed[-1].stop)
    for packet in placed:
        context.place(engine.store.get(packet.packet_id, engine.signature))
    for name, buffer in zip(("keys", "values"), context.buffers, strict=True):
        found = cache.at(1, name, 0, placed[-1].stop)
        assert_close(found, buffer[1, 0, :, : placed[-1].stop], atol=0, rtol=0)


def test_a_packet_that_went_missing_or_is_another_models_is_an_error(engine: KVPacketEngine, prompter: VLLMPrompter):
    placed = placed_of(prompter, prompter.prompt(messages(CHUNKS[:2])))
    cache = PagedCache(engine, SCATTERED)
    with pytest.raises(PacketMismatchError, match="weights"):
        cache.load([replace(p, signature=replace(p.signature, weights="other")) for p in placed])
    engine.store.delete(placed[2].packet_id)
    with pytest.raises(PacketNotFoundError):
        cache.load(placed)


def test_a_cache_of_other_layers_is_refused(engine: KVPacketEngine):
    cache = PagedCache(engine, SCATTERED)
    del cache.rows[1]
    with pytest.raises(UnsupportedModelError, match=r"\[0, 1, 2\].*\[0, 2\]"):
        cache.loader()


def test_what_runs_inside_vllm_loads_neither_transformers_nor_the_engine():
    loaded = modules_after("import kvpacket_rag.serving.vllm_admit, kvpacket_rag.serving.vllm_load")
    assert "torch" in loaded and not loaded & {"transformers", "faiss", "sentence_transformers", "vllm"}


def test_a_load_that_fails_before_a_step_names_the_blocks_it_left_unwritten(
    engine: KVPacketEngine, prompter: VLLMPrompter, caplog: pytest.LogCaptureFixture
):
    placed = placed_of(prompter, prompter.prompt(messages(CHUNKS[:3])))
    work = Work(PagedCache(engine, SCATTERED).loader(), BLOCK)
    engine.store.delete(placed[-1].packet_id)
    work.start(Step((Load("r", placed, 2 * BLOCK, SCATTERED, False),), frozenset()))
    assert work.take_failed_blocks() == set(SCATTERED[2:]) and work.take_failed_blocks() == set()
    assert work.take_done() == (set(), set()) and "request r cannot be loaded" in caplog.text
    work.close()


def test_loads_beside_the_model_report_when_they_are_over_and_which_failed(
    engine: KVPacketEngine, prompter: VLLMPrompter
):
    good = placed_of(prompter, prompter.prompt(messages(CHUNKS[:2])))
    bad = placed_of(prompter, prompter.prompt(messages(CHUNKS[2:])))
    engine.store.delete(bad[-1].packet_id)
    cache = PagedCache(engine, SCATTERED)
    work = Work(cache.loader(), BLOCK)
    loads = (Load("good", good, 0, SCATTERED, True), Load("bad", bad, 0, SCATTERED[::-1], True))
    work.start(Step(loads, frozenset({"refused"})))
    work.close()  # waits
    assert work.take_done() == ({"good", "bad", "refused"}, {"bad", "refused"})
    assert work.take_done() == (set(), set()) and work.take_failed_blocks() == set()
    assert cache.at(0, "keys", 0, good[-1].stop).isfinite().all()
