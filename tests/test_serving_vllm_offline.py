"""A real vLLM answers from packets token by token as the engine does. Run with `make test-scale`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_runs import World, bad_requests, sections, smollm2, tiny, tokens_of
from vllm_samples import SCALED

pytestmark = pytest.mark.scale

FEW_BLOCKS = {"num_gpu_blocks_override": 29, "max_model_len": 480}  # two of the longest prompts fit, until they grow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def long_run(world: World) -> dict[str, Any]:
    """One vLLM with prefix caching: nine requests, again, bad ones among them, without store, with it again."""
    good, bad = world.requests, list(bad_requests(world, world.requests[0]).values())
    store, away = str(world.folder / "store"), str(world.folder / "away")
    return world.run(
        [
            {"requests": good},
            {"requests": good},
            {"requests": [*good[:4], *bad, *good[4:]]},
            {"requests": good, "move": [store, away]},
            {"requests": good, "move": [away, store]},
        ]
    )


def test_nine_answers_at_once_equal_the_engines_and_again_from_vllms_own_prefix_cache(
    world: World, long_run: dict[str, Any]
):
    lengths = [prompt.packet_tokens for prompt in world.cut]
    assert len(set(lengths)) == 3 and any(length % 32 for length in lengths)  # blocks have 32 tokens
    assert sum(len(tokens) == 24 for tokens in world.expected) >= 6  # few end by themselves before
    first, again = long_run["rounds"][:2]
    assert tokens_of(first) == world.expected and tokens_of(again) == world.expected
    assert long_run["counts"]["vllm:external_prefix_cache_hits"] > 0
    assert long_run["counts"]["vllm:prefix_cache_hits"] > 0


def test_what_is_wrong_fails_alone_and_what_is_right_beside_it_is_answered(world: World, long_run: dict[str, Any]):
    mixed, bad = long_run["rounds"][2], bad_requests(world, world.requests[0])
    failed = {name: answer["finish_reason"] for name, answer in zip(bad, mixed[4:], strict=False)}
    assert failed == dict.fromkeys(bad, "error")
    assert tokens_of(mixed[:4] + mixed[4 + len(bad) :]) == world.expected


def test_without_its_store_every_request_fails_and_none_once_it_is_back(world: World, long_run: dict[str, Any]):
    away, back = long_run["rounds"][3:]
    assert {answer["finish_reason"] for answer in away} == {"error"}
    assert tokens_of(back) == world.expected


def test_after_preemption(world: World):
    found = world.run([{"requests": world.requests}], **FEW_BLOCKS)
    assert found["counts"]["vllm:num_preemptions"] > 0
    assert tokens_of(found["rounds"][0]) == world.expected


def test_without_prefix_caching_and_with_loads_in_the_background_after_preemption_too(world: World):
    rounds = [{"requests": world.requests}, {"requests": world.requests, "one_by_one": True}]
    found = world.run(rounds, async_load=True, enable_prefix_caching=False, **FEW_BLOCKS)
    assert found["counts"]["vllm:num_preemptions"] > 0 and not found["counts"]["vllm:prefix_cache_hits"]
    assert tokens_of(found["rounds"][0]) == tokens_of(found["rounds"][1]) == world.expected


@pytest.mark.parametrize("scaling", [name for name in SCALED if name != "plain"])
def test_soft_tokens_and_scaled_rotary_embeddings(
    scaling: str, make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
):
    world = tiny(tmp_path, make_model(hidden_size=128, rope_parameters=SCALED[scaling]), tokenizer)
    assert (world.prompter.card.header, world.prompter.card.trailer) == (3, 2)
    found = world.run([{"requests": world.requests}, {"requests": world.requests}])
    assert tokens_of(found["rounds"][0]) == tokens_of(found["rounds"][1]) == world.expected


@pytest.mark.parametrize("async_load", [False, True])
def test_a_damaged_packet_fails_its_requests_only(
    async_load: bool, make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
):
    world = tiny(tmp_path, make_model(hidden_size=128), tokenizer)
    requests, expected = world.requests, world.expected
    (name,) = world.engine.encode([sections()[6]])  # of the last three prompts
    (file,) = (tmp_path / "store").rglob(f"{name}.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\1\2\3")
    found = world.run([{"requests": requests}], async_load=async_load)
    assert tokens_of(found["rounds"][0][:6]) == expected[:6]
    assert [answer["finish_reason"] for answer in found["rounds"][0][6:]] == ["error"] * 3
    assert "is damaged" in found["log"]


def test_vllm_does_not_start_with_the_card_of_other_weights(
    make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path
):
    world = tiny(tmp_path, make_model(hidden_size=128), tokenizer)
    make_model(hidden_size=128, seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(AssertionError, match=r"the weights of .* are not those of tiny"):
        world.run([{"requests": []}])
