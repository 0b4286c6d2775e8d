"""A real vLLM behind HTTP answers from packets token by token as the engine does. Run with `make test-scale`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_runs import ANSWER, CONNECTOR, Server, World, bad_requests, serving, smollm2

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module", params=["prefix caching", "background loads"])
def server(world: World, request: pytest.FixtureRequest) -> Iterator[Server]:
    arguments = [] if request.param == "prefix caching" else ["--no-enable-prefix-caching"]
    with serving(
        world, "--logits-processors", f"{CONNECTOR}:KVPacketGuard", *arguments, async_load=bool(arguments)
    ) as running:
        yield running


def test_nine_concurrent_completions_equal_the_engines_twice(world: World, server: Server):
    before = server.metric("vllm:external_prefix_cache_hits_total")
    for _ in range(2):
        with ThreadPoolExecutor(9) as threads:
            replies = list(threads.map(server.complete, world.cut))
        assert [status for status, _ in replies] == [200] * 9
        assert [reply["choices"][0]["token_ids"] for _, reply in replies] == world.expected
    assert server.metric("vllm:external_prefix_cache_hits_total") > before
    assert server.metric("vllm:num_requests_running") == 0


def test_a_chat_completion_from_packets_equals_the_engines(world: World, server: Server):
    body = world.cut[0].body()
    ids = body.pop("prompt")
    body["kv_transfer_params"] |= {"prompt_token_ids": ids}
    body |= {"messages": [{"role": "user", "content": "?"}], "temperature": 0, "max_tokens": ANSWER.max_new_tokens}
    status, reply = server.post("/v1/chat/completions", body)
    assert status == 200 and reply["usage"]["prompt_tokens"] == len(ids), reply
    assert reply["choices"][0]["message"]["content"] == world.engine.generate(world.prompts[0], ANSWER).text


def test_bad_requests_are_told_what_is_wrong_and_do_no_harm(world: World, server: Server):
    good = world.requests[0]
    told: dict[str, tuple[int, str]] = {}
    for name, request in bad_requests(world, good).items():
        fields = {key: value for key, value in request.items() if key != "sampling" and value is not None}
        status, reply = server.post("/v1/completions", fields | {"temperature": 0} | request["sampling"])
        told[name] = status, str(reply)
    for name, words in {
        "malformed": "expected",
        "no packet id": "64 lower-case hex",
        "prompt_logprobs": "packets would be read as text",
    }.items():
        assert told[name][0] == 400 and words in told[name][1], told[name]
    assert all(status >= 400 for name, (status, _) in told.items() if name != "skip_reading_prefix_cache"), told
    status, reply = server.complete(world.cut[0])
    assert status == 200 and reply["choices"][0]["token_ids"] == world.expected[0]
