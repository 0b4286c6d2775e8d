"""Which requests and which set-ups a vLLM with packets lets in; nothing here needs vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from vllm_samples import SCATTERED, PagedCache, bypassing, messages, placed_of, prompter_of, request

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError, PacketMismatchError, StoreError, UnsupportedModelError
from kvpacket_rag.serving.vllm_admit import Admission, Settings, require_same_weights, require_supported
from kvpacket_rag.serving.vllm_card import ServingCard
from kvpacket_rag.serving.vllm_prompt import VLLMPrompter
from kvpacket_rag.store import DiskStore, RemoteStore


def admission(prompter: VLLMPrompter, engine: KVPacketEngine, in_background: bool = False) -> Admission:
    return Admission(prompter.card, engine.store, in_background)


def test_an_admitted_request_is_offered_what_the_cache_lacks(engine: KVPacketEngine, prompter: VLLMPrompter):
    prompt = prompter.prompt(messages(CHUNKS[:3]))
    gate = admission(prompter, engine)
    gate.receive(asked := request(prompt))
    total = prompt.packet_tokens
    offers = [gate.offer(asked, computed) for computed in (0, 32, total, total + 5)]
    assert offers == [(total, False), (total - 32, False), (0, False), (0, False)]
    gate.allocated("r", SCATTERED, total - 32)
    gate.allocated("r", SCATTERED, 0)
    (load,) = gate.take_step().loads
    assert (load.start, load.block_ids, load.in_background) == (32, SCATTERED, False)
    assert gate.take_step().loads == ()


def test_plain_requests_pass_and_background_loads_are_said_to_be_so(engine: KVPacketEngine, prompter: VLLMPrompter):
    gate = admission(prompter, engine, in_background=True)
    prompt = prompter.prompt(messages(CHUNKS[:1]))
    gate.receive(asked := request(prompt))
    gate.receive(plain := request(prompter.prompt("Hello there"), "plain", cache_salt="mine"))
    assert gate.offer(asked, 0) == (prompt.packet_tokens, True) and gate.offer(asked, 4096) == (0, False)
    assert gate.offer(plain, 0) == (0, False)


REFUSED: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"sampling_params": bypassing(prompt_logprobs=1)},
    "prompt_logprob_token_ids": {"sampling_params": bypassing(prompt_logprob_token_ids=[1])},
    "skip_reading_prefix_cache": {"sampling_params": bypassing(skip_reading_prefix_cache=True)},
    "LoRA": {"lora_request": object()},
    "embeddings": {"prompt_token_ids": None},
    "cache_salt": {"cache_salt": None},
    "malformed": {"kv_transfer_params": {"kvpacket": 3}},
    "salt without packets": {"kv_transfer_params": None},
    "no token ids": {"prompt_token_ids": [-1] * 4096},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_request_is_failed_by_the_worker_and_computes_nothing(
    reason: str, engine: KVPacketEngine, prompter: VLLMPrompter, caplog: pytest.LogCaptureFixture
):
    gate = admission(prompter, engine)
    refused = request(prompter.prompt(messages(CHUNKS[:2])), skip_reading_prefix_cache=True, **REFUSED[reason])
    gate.receive(refused)
    rest = refused.num_tokens - 16
    assert gate.offer(refused, 16) == (rest, True) and not refused.skip_reading_prefix_cache
    gate.allocated("r", SCATTERED, rest)
    step = gate.take_step()
    assert step.refused == {"r"} and step.loads == () and "refused" in caplog.text
    gate.forget("r")
    assert gate.offer(refused, 0) == (0, False)


def test_packets_that_are_not_stored_are_refused(
    engine: KVPacketEngine, prompter: VLLMPrompter, caplog: pytest.LogCaptureFixture
):
    prompt = prompter.prompt(messages(CHUNKS[:2]))
    engine.store.delete(engine.encode(CHUNKS[1:2])[0])
    gate = admission(prompter, engine)
    gate.receive(asked := request(prompt))
    assert gate.offer(asked, 0) == (asked.num_tokens, True) and "not in the store" in caplog.text


def test_a_card_comes_back_as_it_was_written(soft_prompter: VLLMPrompter, tmp_path: Path):
    soft_prompter.card.save(tmp_path / "card.json")
    card = ServingCard.load(tmp_path / "card.json")
    assert card == soft_prompter.card and (card.header, card.trailer) == (3, 2)
    assert card.plan.digest == card.signature.rope and [p.name for p in tmp_path.iterdir()] == ["card.json"]


def test_cards_that_are_none_or_were_edited_are_refused(prompter: VLLMPrompter, tmp_path: Path):
    path = tmp_path / "card.json"
    prompter.card.save(path)
    good = json.loads(path.read_text())
    bad: list[Any] = [[], {}, good | {"format": "x"}, good | {"header": -1}, good | {"more": 1}, good | {"plan": {}}]
    for text in ["", "{", *map(json.dumps, bad)]:
        path.write_text(text)
        with pytest.raises(StoreError, match="no card"):
            ServingCard.load(path)
    good["plan"]["groups"][0]["rotation"]["frequencies"][0] *= 2
    path.write_text(json.dumps(good))
    with pytest.raises(PacketMismatchError, match="rotary plan"):
        ServingCard.load(path)
    with pytest.raises(StoreError, match="no card"):
        ServingCard.load(tmp_path / "nowhere.json")


def test_settings_are_checked_by_name_and_type(tmp_path: Path):
    assert Settings.of({"card": "c", "store": "s", "async_load": True}).async_load
    wrong: list[dict[str, Any]] = [{}, {"card": "c"}, {"card": "c", "store": "s", "asink": True}]
    wrong += [{"card": "c", "store": 1}, {"card": "c", "store": "s", "verify_weights": "no"}]
    for given in wrong:
        with pytest.raises(KVPacketError, match="kv_connector_extra_config"):
            Settings.of(given)
    for given in ({"store": "s3://b/p"}, {"store": "s3://b/p", "cache": "near", "namespace": "n"}):
        with pytest.raises(KVPacketError, match="object store"):
            Settings.of({"card": "c", **given})
    with pytest.raises(StoreError, match="no store"):
        Settings("c", str(tmp_path / "nowhere")).open_store()
    assert not (tmp_path / "nowhere").exists()


def test_settings_open_the_folder_of_packets_the_cache_of_an_object_store_and_the_store_itself(tmp_path: Path):
    url = f"file://{tmp_path}/objects"
    DiskStore(tmp_path / "disk", namespace="them").close()
    RemoteStore(url, tmp_path / "near").close()
    kinds = [
        (Settings("c", str(tmp_path / "disk"), "them"), DiskStore),
        (Settings("c", str(tmp_path / "near"), cache_bytes=7), RemoteStore),
        (Settings("c", url, cache=str(tmp_path / "other"), cache_bytes=7), RemoteStore),
    ]
    for settings, kind in kinds:
        with closing(settings.open_store()) as store:
            assert isinstance(store, kind)
            if isinstance(store, RemoteStore):
                disk = store.tiers["disk"]
                assert store.url.rstrip("/") == url and isinstance(disk, DiskStore) and disk.max_bytes == 7


def test_packets_of_an_object_store_are_read_in_the_background_and_may_be_newer_than_what_is_known_here(
    backbone: Backbone, tmp_path: Path
):
    url = f"file://{tmp_path}/objects"
    here, there = (RemoteStore(url, tmp_path / name) for name in ("here", "there"))
    prompter = prompter_of(KVPacketEngine(backbone, there, min_match_tokens=4))
    prompt = prompter.prompt(messages(CHUNKS[:2]))
    gate = Admission(prompter.card, here, in_background=False)
    gate.receive(asked := request(prompt))
    assert gate.offer(asked, 0) == (prompt.packet_tokens, True)
    cache = PagedCache(KVPacketEngine(backbone, here), SCATTERED)
    cache.load(placed := placed_of(prompter, prompt))
    assert cache.at(0, "keys", 0, placed[-1].stop).isfinite().all()
    for store in (here, there):
        store.close()


def vllm_config(**changed: Any) -> Any:
    found = {"policy": "fail", "tp": 1, "dtype": torch.float32, "cache": "auto", "length": 2048} | changed
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=found["policy"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=found["tp"], pipeline_parallel_size=1),
        model_config=SimpleNamespace(dtype=found["dtype"], max_model_len=found["length"]),
        cache_config=SimpleNamespace(cache_dtype=found["cache"]),
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policy": "recompute"}, "kv_load_failure_policy"),
        ({"tp": 2}, "tensor_parallel_size"),
        ({"dtype": torch.bfloat16}, "--dtype float32"),
        ({"cache": "fp8"}, "fp8"),
        ({"length": 4096}, "--max-model-len 2048"),
    ],
)
def test_a_vllm_that_would_answer_wrongly_does_not_start(prompter: VLLMPrompter, changed: Any, said: str):
    require_supported(vllm_config(), prompter.card)
    with pytest.raises((UnsupportedModelError, PacketMismatchError), match=said):
        require_supported(vllm_config(**changed), prompter.card)


def test_other_weights_are_refused(prompter: VLLMPrompter, make_model: Callable[..., Any], tmp_path: Path):
    for seed in (0, 1):
        make_model(seed=seed).save_pretrained(tmp_path / str(seed))
    require_same_weights(SimpleNamespace(model=str(tmp_path / "0"), revision=None), prompter.card)
    with pytest.raises(PacketMismatchError, match="not those of tiny"):
        require_same_weights(SimpleNamespace(model=str(tmp_path / "1"), revision=None), prompter.card)


def test_compressed_packets_have_no_card(engine: KVPacketEngine):
    squeezed = SimpleNamespace(
        signature=replace(engine.signature, compression="knorm:0.5"), backbone=engine.backbone, encoder=engine.encoder
    )
    with pytest.raises(UnsupportedModelError, match="compressed"):
        ServingCard.of(squeezed)  # type: ignore[arg-type]
