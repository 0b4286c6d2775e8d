"""Replicas of a real vLLM in a Ray cluster answer from packets as the engine does. Run with `make test-scale`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm_runs import Server, World, serving_replicas, tiny

from kvpacket_rag.serving.server.vllm_backend import VLLMAddress

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def world(make_model: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    return tiny(tmp_path_factory.mktemp("tiny"), make_model(hidden_size=128), tokenizer)


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Server]:
    with serving_replicas(world, 2) as running:
        yield running


def test_two_replicas_answer_concurrent_requests_with_the_engines_tokens(world: World, server: Server):
    with ThreadPoolExecutor(9) as threads:
        replies = list(threads.map(server.complete, world.cut * 2))
    assert [status for status, _ in replies] == [200] * 18, replies
    assert [reply["choices"][0]["token_ids"] for _, reply in replies] == world.expected * 2
    assert len(set(re.findall(r"LLMServer\S* pid=(\d+)", server.log.read_text()))) == 2


def test_a_malformed_request_is_told_what_is_wrong(world: World, server: Server):
    status, reply = server.complete(world.cut[0], kv_transfer_params={"kvpacket": {"packets": 3}})
    assert status == 400 and "expected" in str(reply)


def test_our_own_server_finds_the_model_there(server: Server):
    found = VLLMAddress(server.url).find_model()
    assert (found.name, found.window) == ("served", 2048)
