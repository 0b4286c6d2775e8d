"""The server in front of a real vLLM answers as the engine does. Run with `make test-scale`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_samples import Served, eventually
from server_samples import serving as our_server
from vllm_runs import ANSWER, CONNECTOR, Server, World, serving, smollm2

from kvpacket_rag.serving.server.vllm_backend import VLLMAddress, VLLMBackend

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def vllm(world: World) -> Iterator[Server]:
    with serving(world, "--logits-processors", f"{CONNECTOR}:KVPacketGuard") as running:
        yield running


@pytest.fixture(scope="module")
def served(world: World, vllm: Server) -> Iterator[Served]:
    address = VLLMAddress(vllm.url)
    with our_server(VLLMBackend(world.engine, None, address, address.find_model())) as running:
        yield running


def test_nine_concurrent_chats_are_answered_from_packets_as_by_the_engine(world: World, vllm: Server, served: Served):
    before = vllm.metric("vllm:external_prefix_cache_hits_total")

    def text(number: int) -> tuple[str | None, bool]:
        chat = [{"role": message.role, "content": message.content} for message in world.prompts[number]]
        found = served.openai.with_options(timeout=600).chat.completions.create(
            model="tiny",
            messages=chat,  # type: ignore[arg-type]
            max_tokens=ANSWER.max_new_tokens,
        )
        assert found.usage and found.usage.prompt_tokens_details
        return found.choices[0].message.content, bool(found.usage.prompt_tokens_details.cached_tokens)

    with ThreadPoolExecutor(9) as threads:
        found = list(threads.map(text, range(9)))
    assert found == [(world.engine.generate(prompt, ANSWER).text, True) for prompt in world.prompts]
    assert vllm.metric("vllm:external_prefix_cache_hits_total") > before


def test_a_client_that_leaves_ends_the_answer_in_vllm(vllm: Server, served: Served):
    chat = [{"role": "user", "content": "Write a long story."}]
    stream = served.openai.with_options(timeout=600).chat.completions.create(
        model="tiny",
        messages=chat,  # type: ignore[arg-type]
        max_tokens=1500,
        stream=True,
    )
    next(stream)
    stream.close()
    eventually(lambda: vllm.metric("vllm:num_requests_running") == 0, 60)
