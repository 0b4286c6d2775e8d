"""How a KVPacketLLM is made: whose arguments it takes, what it refuses, copies and pickles."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNKS
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index_kvpacket import KVPacketLLM, KVPacketVectorStore

from kvpacket_rag import Backbone, GenerationSettings, KVPacketEngine, KVPacketError, PromptError

TEXT = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nWho signed the lease?"


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    engine.encode(CHUNKS)
    return KVPacketLLM(engine=engine, max_new_tokens=8)


@pytest.fixture
def loads(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What engines were loaded from; the tiny one is loaded in place of each."""
    seen: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(KVPacketEngine, "load", lambda name, **given: seen.append((name, given)) or engine)
    monkeypatch.setattr(engine.backbone, "name", "mine")
    return seen


@pytest.fixture
def folder(backbone: Backbone, tmp_path: Path) -> Path:
    """The tiny model as files."""
    backbone.model.save_pretrained(tmp_path / "model")
    backbone.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 4}, r"'max_tokens' \(meant 'max_new_tokens'\?\)"),
        ({"generate_kwargs": {"num_beams": 4}}, "'num_beams'"),
        ({"model_name": "other"}, "has loaded 'tiny'.*model_name='other'"),
        ({"device_map": "cuda"}, "device_map besides"),
        ({"model": object()}, "model besides"),
        ({"max_new_tokens": 2048}, "max_new_tokens 2048"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"stopping_ids": [50278]}, "token 50278 cannot end an answer of tiny, which has 451"),
    ],
)
def test_arguments_that_cannot_have_effect_are_refused_at_once(
    engine: KVPacketEngine, fields: dict[str, Any], message: str
):
    with pytest.raises(KVPacketError, match=message):
        KVPacketLLM(engine=engine, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_kwargs": {"quantization_config": 1}}, "'quantization_config', which .* load .* yourself"),
        ({"model_kwargs": {"attn_implementation": "flash_attention_2"}}, "use 'sdpa' or 'eager'"),
        ({"model_kwargs": {"device_map": "cuda"}, "device_map": "cpu"}, "device_map is 'cpu' and 'cuda' at once"),
        ({"tokenizer_kwargs": {"add_bos_token": True}}, "tokenizer_kwargs holds 'add_bos_token'"),
        ({"model_kwargs": {"torch_dtype": torch.float16}, "dtype": "float32"}, "'float16' and 'float32' at once"),
        ({"device": "cpu", "device_map": "cuda"}, "device_map is 'cpu' and 'cuda' at once"),
        ({"device_map": {"model": 0, "lm_head": 1}}, "packets need the model on one device"),
    ],
)
def test_loading_arguments_that_cannot_have_effect_are_refused_before_anything_is_loaded(
    loads: list[Any], fields: dict[str, Any], message: str
):
    with pytest.raises(KVPacketError, match=message):
        KVPacketLLM("mine", **fields)
    assert loads == []


def test_arguments_of_hugging_face_llm_are_understood(loads: list[tuple[str, dict[str, Any]]]):
    llm = KVPacketLLM(
        model_name="mine",
        tokenizer_name="mine",
        context_window=1024,
        max_new_tokens=7,
        system_prompt="Be brief.",
        query_wrapper_prompt="<{query_str}>",
        device_map={"": "cpu"},
        stopping_ids=[1, 2],
        tokenizer_kwargs={"max_length": 1024, "token": "other"},
        tokenizer_outputs_to_remove=["token_type_ids"],
        model_kwargs={"torch_dtype": torch.float32, "device_map": "cpu", "cache_dir": "files", "token": "secret"},
        generate_kwargs={"temperature": 0.7, "do_sample": False, "pad_token_id": 0, "num_beams": 1},
        is_chat_model=True,
        messages_to_prompt=None,
        completion_to_prompt=None,
    )
    ((name, given),) = loads
    assert (name, given["device"], given["dtype"], given["adapter"]) == ("mine", "cpu", "float32", "auto")
    assert given["model_kwargs"] == {"cache_dir": "files", "token": "secret"} and "secret" not in repr(llm)
    assert given["tokenizer_kwargs"] == {"max_length": 1024, "token": "other"}
    assert llm.generation_settings({}) == GenerationSettings(max_new_tokens=7, stop=("<|im_start|>",))
    assert llm.metadata.context_window == 1024 and llm.metadata.num_output == 7 and llm.metadata.is_chat_model


def test_a_window_larger_than_the_models_is_cut_to_it_with_a_warning(
    engine: KVPacketEngine, caplog: pytest.LogCaptureFixture
):
    assert KVPacketLLM(engine=engine, context_window=4096).metadata.context_window == 2048
    assert "context_window is 4096, and tiny has 2048" in caplog.text


def test_a_model_and_a_tokenizer_that_are_loaded_are_used_as_they_are(backbone: Backbone, tmp_path: Path):
    llm = KVPacketLLM(
        model_name="my model",
        model=backbone.model,
        tokenizer=backbone.tokenizer,
        model_kwargs={"quantization_config": 1},
        store=tmp_path / "packets",
        adapter=None,
        max_new_tokens=8,
    )
    llm.engine.encode(CHUNKS)
    assert llm.engine.backbone.model is backbone.model and llm.engine.backbone.tokenizer is backbone.tokenizer
    assert llm.model_name == "my model" and llm.complete(TEXT).raw["usage"]["chunks_reused"] == 2
    with pytest.raises(KVPacketError, match=r"loaded in torch.float32 on cpu, and dtype='float16' besides"):
        KVPacketLLM(model=backbone.model, tokenizer=backbone.tokenizer, dtype="float16")
    with pytest.raises(KVPacketError, match="cannot be pickled"):
        pickle.dumps(llm)


def test_a_tokenizer_of_another_name_is_loaded(backbone: Backbone, folder: Path, tmp_path: Path):
    other = copy.deepcopy(backbone.tokenizer)
    other.chat_template = None
    other.save_pretrained(tmp_path / "other")
    llm = KVPacketLLM(str(folder), tokenizer_name=str(tmp_path / "other"), adapter=None)
    assert not llm.metadata.is_chat_model and KVPacketLLM(str(folder), adapter=None).metadata.is_chat_model
    again = KVPacketLLM(model=backbone.model, tokenizer_name=str(folder), adapter=None)
    assert again.metadata.is_chat_model and again.engine.backbone.model is backbone.model
    (tmp_path / "empty").mkdir()
    with pytest.raises(KVPacketError, match=r"the tokenizer of model .*empty' cannot be loaded"):
        KVPacketLLM(model=backbone.model, tokenizer_name=str(tmp_path / "empty"))


def test_attention_and_files_asked_for_are_those_of_the_model(folder: Path, tmp_path: Path):
    kwargs = {"attn_implementation": "eager", "cache_dir": tmp_path / "files", "dtype": torch.float32}
    llm = KVPacketLLM(str(folder), model_kwargs=kwargs, tokenizer_kwargs={"local_files_only": True}, adapter=None)
    store = KVPacketVectorStore(path=tmp_path / "index", model_name=str(folder), model_kwargs=kwargs, adapter=None)
    for engine in (llm.engine, store.engine):
        assert engine.backbone.model.config._attn_implementation == "eager"
    again = KVPacketVectorStore(path=tmp_path / "index", model_kwargs={"torch_dtype": "float32", "revision": "main"})
    assert again.engine.signature == llm.engine.signature


def test_what_was_said_of_prompts_decides_whether_they_are_chats(engine: KVPacketEngine):
    def is_chat(**fields: Any) -> bool:
        return KVPacketLLM(engine=engine, **fields).metadata.is_chat_model

    assert is_chat() and is_chat(query_wrapper_prompt="{query_str}") and is_chat(messages_to_prompt=str)
    assert not is_chat(query_wrapper_prompt=PromptTemplate("<{query_str}>")) and not is_chat(completion_to_prompt=str)
    assert not is_chat(is_chat_model=False) and is_chat(is_chat_model=True, completion_to_prompt=str)


def test_a_model_that_is_said_to_be_no_chat_model_reads_plain_text(llm: KVPacketLLM):
    plain = KVPacketLLM(engine=llm.engine, is_chat_model=False, max_new_tokens=8)
    assert plain.complete(TEXT).text == llm.complete(TEXT, formatted=True).text != llm.complete(TEXT).text


def test_transformers_names_of_settings_are_understood(llm: KVPacketLLM):
    llm.generate_kwargs = {"do_sample": True, "top_k": 5, "max_new_tokens": 3}
    assert llm.generation_settings({}) == GenerationSettings(max_new_tokens=3, temperature=1.0, top_k=5)
    assert llm.generation_settings({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert llm.generation_settings({"stop_strings": ["a"], "seed": 4}).stop == ("a",)


@pytest.mark.parametrize("method", ["complete", "stream_complete"])
def test_a_stopping_id_ends_the_answer_at_its_token(llm: KVPacketLLM, method: str):
    whole = llm.complete(TEXT, max_tokens=24).text
    token = next(i for i in llm.token_ids(whole)[3:] if "\ufffd" not in llm.engine.backbone.decode([i]))
    expected = whole[: whole.index(llm.engine.backbone.decode([token]))]
    for stops in (KVPacketLLM(engine=llm.engine, stopping_ids=[token]), KVPacketLLM(engine=llm.engine)):
        given = {} if stops.stopping_ids else {"eos_token_id": [token, 2]}
        result = getattr(stops, method)(TEXT, max_tokens=24, **given)
        last = result if method == "complete" else list(result)[-1]
        assert last.text == expected and last.raw["finish_reason"] == "stop"


def test_a_control_token_ends_the_answer_though_it_has_no_text(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    step = llm.engine.backbone.step

    def control_token_first(*args: Any) -> torch.Tensor:
        logits = step(*args).clone()
        logits[0, 1] = 1e9
        return logits

    monkeypatch.setattr(llm.engine.backbone, "step", control_token_first)
    usage = KVPacketLLM(engine=llm.engine, stopping_ids=[1]).complete(TEXT).raw["usage"]
    assert usage["completion_tokens"] == 2


def test_arguments_of_the_chat_template_reach_it(llm: KVPacketLLM, monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, Any]] = []
    tokenizer = llm.engine.backbone.tokenizer
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda m, **given: seen.append(given) or apply(m, **given))
    llm.chat_template_kwargs = {"enable_thinking": False, "documents": None}
    llm.chat([ChatMessage(content="hi")], chat_template_kwargs={"enable_thinking": True})
    assert seen[-1]["enable_thinking"] is True and seen[-1]["documents"] is None


def test_a_copy_shares_the_engine_and_a_dump_holds_no_weights(llm: KVPacketLLM):
    twin = copy.deepcopy(llm)
    assert twin.engine is llm.engine and twin.complete(TEXT).text == llm.complete(TEXT).text
    assert len(repr(llm)) < 2000 and "ensor" not in repr(llm)
    assert llm.to_dict()["class_name"] == "KVPacketLLM" and "_engine" not in llm.to_dict()
    assert KVPacketLLM.from_dict(llm.to_dict(), engine=llm.engine).to_dict() == llm.to_dict()


def test_a_pickle_holds_the_configuration_and_loads_the_engine_again(
    engine: KVPacketEngine, loads: list[tuple[str, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    llm = KVPacketLLM(
        "mine", store="packets", device="cpu", model_kwargs={"dtype": torch.float32}, stop="x", match="hints"
    )
    blob, here = pickle.dumps(llm), Path.cwd()
    monkeypatch.chdir(tmp_path)  # another process may work in another folder
    twin = pickle.loads(blob)
    assert len(blob) < 5000 and twin.to_dict() == llm.to_dict() and twin.engine is engine
    assert loads[0] == loads[1] and loads[0][0] == "mine" and loads[0][1]["store"] == str(here / "packets")
    hinted = llm.hinted(["a", "b"])
    twins = pickle.loads(pickle.dumps(hinted)), copy.copy(hinted), copy.deepcopy(hinted), hinted.model_copy()
    assert [twin.hints for twin in twins] == [("a", "b")] * 4


def test_a_pickle_loads_the_same_folders_in_another_working_folder(
    backbone: Backbone, make_model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    there = tmp_path / "elsewhere"
    for place, seed in ((tmp_path, 0), (there, 1)):  # another model of the same name lies there
        make_model(seed=seed).save_pretrained(place / "model")
        backbone.tokenizer.save_pretrained(place / "model")
        backbone.tokenizer.save_pretrained(place / "tokens")
    for fields in ({}, {"tokenizer_name": "model"}, {"tokenizer_name": "tokens"}):
        monkeypatch.chdir(tmp_path)
        llm = KVPacketLLM("model", adapter=None, **fields)
        assert llm.model_name == str(folder) and llm.tokenizer_name in (None, *map(str, tmp_path.iterdir()))
        blob = pickle.dumps(llm)
        monkeypatch.chdir(there)
        twin = pickle.loads(blob)
        assert twin.engine.signature == llm.engine.signature and twin.to_dict() == llm.to_dict()
    monkeypatch.chdir(there)
    assert KVPacketLLM("model", adapter=None).engine.signature != llm.engine.signature


def test_an_llm_made_from_an_engine_says_why_it_cannot_be_pickled(llm: KVPacketLLM):
    with pytest.raises(KVPacketError, match="make it from model_name"):
        pickle.dumps(llm)


def test_an_invalid_choice_names_the_valid_ones(llm: KVPacketLLM):
    with pytest.raises(ValueError, match="'auto', 'hints' or 'off'"):
        KVPacketLLM(engine=llm.engine, match="all")
    with pytest.raises(PromptError, match="on_miss is 'raise', expected 'prefill', 'warn', 'error'"):
        llm.complete(TEXT, on_miss="raise")


def test_the_usage_is_logged_for_those_who_print_the_log(llm: KVPacketLLM, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="llama_index_kvpacket"):
        usage = llm.complete(TEXT).raw["usage"]
    told = f"{usage['packet_tokens']} of {usage['prompt_tokens']} prompt tokens came from packets of 2 chunks; 0 chunks"
    assert told in caplog.text
