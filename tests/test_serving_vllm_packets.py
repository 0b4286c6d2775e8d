"""A real vLLM answers from packets of every kind it takes as the engine does. Run with `make test-scale`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_samples import s3
from vllm_runs import CONNECTOR, Server, World, sections, serving, tiny, tokens_of

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.serving.vllm_prompt import VLLMPrompter
from kvpacket_rag.store import RemoteStore

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("scheme", ["int8", "k8v4", "int4"])
def test_quantised_packets(scheme: str, make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path):
    model = make_model(hidden_size=256)  # heads wide enough for groups
    world = tiny(tmp_path, model, tokenizer, reduction=Reduction.of(None, scheme))
    assert world.prompter.card.signature.quantization != "none"
    found = world.run([{"requests": world.requests}])
    assert tokens_of(found["rounds"][0]) == world.expected


def test_bfloat16_packets(make_model: Callable[..., Any], tokenizer: Any, tmp_path: Path):
    world = tiny(tmp_path, make_model(hidden_size=128, dtype=torch.bfloat16), tokenizer)
    assert world.dtype == "bfloat16"
    answers = tokens_of(world.run([{"requests": world.requests}])["rounds"][0])
    pairs = list(zip(answers, world.expected, strict=True))
    assert [answer[0] for answer, _ in pairs] == [own[0] for _, own in pairs]
    assert sum(answer == own for answer, own in pairs) >= 4  # vLLM rounds elsewhere, which decides close choices


@pytest.fixture(scope="module")
def remote(make_model: Callable[..., Any], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> World:
    """An engine whose packets lie in S3; vLLM has a cache of its own, as on another machine."""
    folder, url = tmp_path_factory.mktemp("remote"), s3().url()
    store = RemoteStore(url, folder / "store")
    world = tiny(folder, make_model(hidden_size=128), tokenizer, store)
    world.settings = {"store": url, "cache": str(folder / "near")}
    return world


@pytest.fixture(scope="module")
def server(remote: World) -> Iterator[Server]:
    with serving(remote, "--logits-processors", f"{CONNECTOR}:KVPacketGuard", "--no-enable-prefix-caching") as running:
        yield running


def answered(server: Server, world: World, number: int) -> Any:
    """Tokens of a reply, or its status where it failed."""
    status, reply = server.complete(world.cut[number])
    return reply["choices"][0]["token_ids"] if status == 200 else status


def test_packets_of_an_object_store_and_what_happens_when_it_goes_away(remote: World, server: Server):
    expected = remote.expected  # which puts the preamble's packet there, after vLLM started
    assert [answered(server, remote, number) for number in range(6)] == expected[:6]
    s3().kill()
    try:
        assert answered(server, remote, 0) == expected[0]  # from the cache
        assert answered(server, remote, 8) == 500  # never read before
        assert answered(server, remote, 5) == expected[5]
    finally:
        s3().start()
    assert [answered(server, remote, number) for number in range(9)] == expected


def test_packets_of_an_adapter_that_changed_while_vllm_runs_are_refused_and_the_old_ones_stay(
    remote: World, server: Server
):
    backbone = remote.engine.backbone
    changed = KVPacketEngine(backbone, remote.engine.store, Adapter.random(backbone.embed(range(500)), 3, 2, seed=2))
    changed.encode(sections())
    status, reply = server.complete(VLLMPrompter(changed).prompt(remote.prompts[0]))
    assert status == 500 and "choices" not in reply
    assert "model, adapter or dtype differ" in server.log.read_text()
    assert answered(server, remote, 0) == remote.expected[0]
