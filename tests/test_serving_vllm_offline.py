"""A real vLLM answers from packets token by token as the engine does. Run with `make test-scale`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_runs import SMALL, World, bad_requests, chats, sections, tokens_of, world_of
from vllm_samples import SCALED

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.store import DiskStore

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """With the adapter that ships, which leaves no soft tokens in packets."""
    return world_of(tmp_path_factory.mktemp("shipped"))


def test_nine_answers_at_once_equal_the_engines_and_again_from_vllms_own_prefix_cache(world: World):
    prompts = world.cut()
    assert len({prompt.packet_tokens for prompt in prompts}) >= 3 and any(p.packet_tokens % 32 for p in prompts)
    found = world.run([{"requests": world.requests()}, {"requests": world.requests()}])
    expected = world.expected()
    assert tokens_of(found["rounds"][0]) == expected and tokens_of(found["rounds"][1]) == expected
    assert sum(len(tokens) == 24 for tokens in expected) >= 6  # few end by themselves before
    assert found["counts"]["vllm:external_prefix_cache_hits"] > 0 and found["counts"]["vllm:prefix_cache_hits"] > 0


def test_without_prefix_caching_and_with_loads_in_the_background(world: World):
    rounds = [{"requests": world.requests()}, {"requests": world.requests(), "one_by_one": True}]
    found = world.run(rounds, async_load=True, enable_prefix_caching=False)
    assert tokens_of(found["rounds"][0]) == tokens_of(found["rounds"][1]) == world.expected()
    assert found["counts"]["vllm:external_prefix_cache_hits"] == 2 * sum(p.packet_tokens for p in world.cut())


@pytest.mark.parametrize("async_load", [False, True])
def test_after_preemption(world: World, async_load: bool):
    found = world.run([{"requests": world.requests()}], async_load=async_load, num_gpu_blocks_override=26)
    assert found["counts"]["vllm:num_preemptions"] > 0
    assert tokens_of(found["rounds"][0]) == world.expected()


def test_soft_tokens_in_packets_take_places_in_the_prompt(tmp_path: Path):
    backbone = KVPacketEngine.load(SMALL, adapter=None, dtype="float32").backbone
    world = world_of(tmp_path, adapter=Adapter.random(backbone.embed(range(2000)), 3, 2, seed=1))
    assert (world.prompter.card.header, world.prompter.card.trailer) == (3, 2)
    found = world.run([{"requests": world.requests()}, {"requests": world.requests()}])
    assert tokens_of(found["rounds"][0]) == tokens_of(found["rounds"][1]) == world.expected()


@pytest.mark.parametrize("scaling", [name for name in SCALED if name != "plain"])
def test_scaled_rotary_embeddings(scaling: str, make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path):
    model = make_model(hidden_size=128, rope_parameters=SCALED[scaling])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    backbone = Backbone(model, tokenizer, "tiny")
    adapter = Adapter.random(backbone.embed(range(500)), 3, 2, seed=1)
    engine = KVPacketEngine(backbone, DiskStore(tmp_path / "store"), adapter)
    texts = sections()
    engine.encode(texts)
    world = World(engine, tmp_path, tmp_path / "model", chats(texts))
    assert tokens_of(world.run([{"requests": world.requests()}])["rounds"][0]) == world.expected()


def test_what_is_wrong_fails_alone_and_what_is_right_beside_it_is_answered(world: World):
    good, expected = world.requests(), world.expected()
    bad = bad_requests(world, good[0])
    store, away = str(world.folder / "store"), str(world.folder / "away")
    rounds = [
        {"requests": [*good[:4], *bad.values(), *good[4:]]},
        {"requests": good, "move": [store, away]},
        {"requests": good, "move": [away, store]},
    ]
    first, unreachable, back = world.run(rounds)["rounds"]
    failed = {name: answer["finish_reason"] for name, answer in zip(bad, first[4:], strict=False)}
    assert failed == dict.fromkeys(bad, "error")
    assert tokens_of(first[:4] + first[4 + len(bad) :]) == expected
    assert {answer["finish_reason"] for answer in unreachable} == {"error"}
    assert tokens_of(back) == expected


@pytest.mark.parametrize("async_load", [False, True])
def test_a_damaged_packet_fails_its_requests_only(async_load: bool, tmp_path: Path):
    world = world_of(tmp_path)
    requests, expected = world.requests(), world.expected()
    (name,) = world.engine.encode([sections()[6]])  # of the last three prompts
    (file,) = (tmp_path / "store").rglob(f"{name}.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\1\2\3")
    found = world.run([{"requests": requests}], async_load=async_load)
    assert tokens_of(found["rounds"][0][:6]) == expected[:6]
    assert [answer["finish_reason"] for answer in found["rounds"][0][6:]] == ["error"] * 3
    assert "is damaged" in found["log"]
    assert tokens_of(world.run([{"requests": world.requests()}])["rounds"][0]) == expected


def test_vllm_does_not_start_with_the_card_of_other_weights(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
):
    model = make_model(hidden_size=128)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1
    engine = KVPacketEngine(Backbone(model, tokenizer, "tiny"), DiskStore(tmp_path / "store"))
    world = World(engine, tmp_path, tmp_path / "model", [])
    with pytest.raises(AssertionError, match=r"the weights of .* are not those of tiny"):
        world.run([{"requests": []}])
