"""Arguments of langchain-huggingface's local classes keep their meaning, or are refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import pytest
import torch
from conftest import CHUNKS
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_kvpacket import ChatKVPacket, KVPacketLLM
from langchain_samples import across_tokens, chat_about
from transformers import pipeline

from kvpacket_rag import Adapter, DiskStore, GenerationSettings, KVPacketEngine, KVPacketError, Message, PromptError

ASKED, ASKED_OF_ENGINE = chat_about(CHUNKS[1])


@pytest.fixture(autouse=True)
def _no_engines_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_kvpacket.lazy_engine._engines", WeakValueDictionary())
    monkeypatch.setattr("langchain_kvpacket.lazy_engine._asked_for", WeakSet())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"pipeline_kwargs": {"max_new_tokens": 9}}, {"max_tokens": 9}),
        ({"pipeline_kwargs": {"max_new_tokens": 9}, "max_tokens": 3}, {"max_tokens": 3}),
        ({"pipeline_kwargs": {"do_sample": False, "temperature": 0.7}}, {"temperature": 0.0}),
        ({"pipeline_kwargs": {"do_sample": True}}, {"temperature": 1.0}),
        ({"model_kwargs": {"temperature": 0.2}, "pipeline_kwargs": {"do_sample": True}}, {"temperature": 0.2}),
        ({"pipeline_kwargs": {"do_sample": True}, "temperature": 0.3}, {"temperature": 0.3}),
        ({"pipeline_kwargs": {"do_sample": False}, "temperature": 0.3}, {"temperature": 0.3}),
        ({"model_kwargs": {"temperature": 0.2}, "pipeline_kwargs": {"do_sample": False}}, {"temperature": 0.0}),
        ({"pipeline_kwargs": {"do_sample": None, "temperature": 0.3}}, {"temperature": 0.3}),
        (
            {"pipeline_kwargs": {"do_sample": True, "temperature": 0.2, "top_p": 0.9}},
            {"temperature": 0.2, "top_p": 0.9},
        ),
        ({"model_kwargs": {"temperature": 0.1}, "pipeline_kwargs": {"temperature": 0.4}}, {"temperature": 0.4}),
        ({"pipeline_kwargs": {"stop_strings": "\n", "num_return_sequences": 1}}, {"stop": ["\n"]}),
        ({"stop_sequences": ["a", "b"], "n": 1, "logprobs": False}, {"stop": ["a", "b"]}),
        ({"device": -1}, {"device": "cpu"}),
        ({"device": 1}, {"device": "cuda:1"}),
        ({"device_map": "auto"}, {"device": "auto"}),
        ({"device_map": {"": "cpu"}}, {"device": "cpu"}),
        (
            {"model_kwargs": {"torch_dtype": torch.bfloat16, "device_map": "cpu"}},
            {"dtype": "bfloat16", "device": "cpu"},
        ),
        ({"model_kwargs": {"dtype": "auto"}, "batch_size": 4, "device": None}, {"dtype": "auto", "device": "auto"}),
    ],
)
@pytest.mark.parametrize("make", [ChatKVPacket, KVPacketLLM])
def test_arguments_keep_their_meaning(make: Any, arguments: dict[str, Any], expected: dict[str, Any]):
    for model in (
        make(model_id="gpt-none", **arguments),
        make.from_model_id("gpt-none", "text-generation", **arguments),
    ):
        assert {name: getattr(model, name) for name in expected} == expected and model.model == "gpt-none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_kwargs": {"return_full_text": True}}, "return_full_text is True, and here it can only be False"),
        ({"pipeline_kwargs": {"num_beams": 4}}, "num_beams is 4"),
        ({"pipeline_kwargs": {"max_length": 99}}, "max_length counts the prompt too; pass max_new_tokens"),
        ({"pipeline_kwargs": {"eos_token_id": [2, 3]}}, r"eos_token_id=\[2, 3\] has no counterpart"),
        ({"model_kwargs": {"load_in_4bit": True}}, "'load_in_4bit', which a model that is loaded by name cannot take"),
        ({"model_kwargs": {"attn_implementation": "flash_attention_2"}}, "cannot hide packets from each other"),
        ({"pipeline_kwargs": {"do_sample": True, "temperature": 0.0}}, "do_sample is True, but the temperature is 0"),
        ({"pipeline_kwargs": {"do_sample": True}, "temperature": 0}, "do_sample is True, but the temperature is 0"),
        ({"pipeline_kwargs": [("num_beams", 1)]}, "pipeline_kwargs is a list, expected a dict"),
        ({"model_kwargs": "bfloat16"}, "model_kwargs is a str, expected a dict"),
        ({"device_map": {"model.embed": 0, "lm_head": 1}}, "packets need the model on one device"),
        ({"task": "summarization"}, "task is 'summarization'"),
        ({"backend": "openvino"}, "backend is 'openvino'"),
        ({"n": 2}, "n is 2"),
        ({"llm": "gpt2"}, "llm is a str, expected a KVPacketLLM"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(arguments: dict[str, Any], message: str):
    with pytest.raises(KVPacketError, match=message):
        ChatKVPacket(model_id="gpt-none", **arguments)


def test_a_chat_model_takes_over_what_its_text_model_says(engine: KVPacketEngine):
    llm = KVPacketLLM(engine=engine, pipeline_kwargs={"max_new_tokens": 5}, match="off", stop=["never"])
    chat = ChatKVPacket(llm=llm, temperature=0.0)
    assert (chat.engine, chat.max_tokens, chat.match, chat.stop) == (engine, 5, "off", ["never"])
    assert ChatKVPacket(llm=llm, max_tokens=2).invoke("Hi").usage_metadata["output_tokens"] == 2  # type: ignore[index]
    named = KVPacketLLM(model="gpt-none", store="library")
    assert ChatKVPacket(llm=named).shared_engine is named.shared_engine


def test_a_call_may_pack_its_arguments(engine: KVPacketEngine):
    llm = KVPacketLLM(engine=engine, max_tokens=24)
    expected = engine.generate([Message("user", "Hi")], GenerationSettings(3)).text
    assert llm.invoke("Hi", pipeline_kwargs={"max_new_tokens": 3, "do_sample": False}) == expected
    assert llm.bind(pipeline_kwargs={"max_new_tokens": 9}, max_tokens=3).invoke("Hi", skip_prompt=True) == expected
    with pytest.raises(PromptError, match="num_beams is 2"):
        llm.invoke("Hi", pipeline_kwargs={"num_beams": 2})


def test_to_sample_leaves_a_temperature_that_is_set(engine: KVPacketEngine):
    warm, greedy = KVPacketLLM(engine=engine, temperature=0.3), KVPacketLLM(engine=engine, temperature=0)
    assert warm._call(None, {"do_sample": True}).settings.temperature == 0.3
    assert warm._call(None, {"do_sample": True, "temperature": 0.5}).settings.temperature == 0.5
    assert warm._call(None, {"do_sample": False}).settings.temperature == 0
    assert warm._call(None, {"pipeline_kwargs": {"do_sample": False}, "temperature": 0.5}).settings.temperature == 0.5
    assert KVPacketLLM(engine=engine)._call(None, {"do_sample": True}).settings.temperature == 1
    with pytest.raises(PromptError, match="the temperature is 0, which draws nothing"):
        greedy.invoke("Hi", do_sample=True)


def test_arguments_for_transformers_reach_it(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(KVPacketEngine, "load", lambda _, **options: asked.append(options) or engine)
    theirs = {"cache_dir": "weights", "token": "hf_secret", "revision": "main", "attn_implementation": "eager"}
    given = {**theirs, "torch_dtype": torch.float32, "low_cpu_mem_usage": True}
    llm = KVPacketLLM.from_model_id("gpt-none", model_kwargs=given)
    assert llm.invoke("Hi") and ChatKVPacket(llm=llm).engine is pickle.loads(pickle.dumps(llm)).engine is engine
    assert [options["model_kwargs"] for options in asked] == [theirs] and "hf_secret" not in repr(llm)
    assert KVPacketLLM(model="gpt-none", device="cpu", dtype="float32").engine is engine
    assert len(asked) == 2 and "model_kwargs" not in asked[1]


def test_a_pipeline_gives_its_model_tokenizer_and_settings(backbone: Any):
    made = pipeline("text-generation", model=backbone.model, tokenizer=backbone.tokenizer, max_new_tokens=5)
    llm = KVPacketLLM(pipeline=made)
    llm.engine.encode(CHUNKS)
    info = llm.generate([f"{CHUNKS[1]} So?"]).generations[0][0].generation_info
    assert llm.engine.backbone.model is backbone.model and info
    assert (info["chunks_reused"], info["token_usage"]["completion_tokens"]) == (1, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"return_full_text": True}, "return_full_text is True, and here it can only be False"),
        ({"return_tensors": True}, "return_tensors is True, and answers here are texts"),
        ({"prefix": "Once"}, "prefix='Once' has no counterpart"),
        ({"num_beams": 2}, "num_beams is 2"),
    ],
)
def test_what_a_pipeline_was_given_and_cannot_be_done_is_refused_by_name(
    backbone: Any, given: dict[str, Any], message: str
):
    made = pipeline("text-generation", model=backbone.model, tokenizer=backbone.tokenizer, **given)
    with pytest.raises(PromptError, match=message):
        KVPacketLLM(pipeline=made)


def test_a_pipeline_is_served_from_the_store_and_adapter_beside_it(backbone: Any, adapter: Adapter, tmp_path: Path):
    made = pipeline("text-generation", model=backbone.model, tokenizer=backbone.tokenizer, max_new_tokens=2)
    before = KVPacketEngine(backbone, DiskStore(tmp_path), adapter)
    before.encode(CHUNKS)
    before.close()
    llm = KVPacketLLM(pipeline=made, store=tmp_path, adapter=adapter, min_match_tokens=4, device="auto")
    info = llm.generate([f"{CHUNKS[1]} So?"]).generations[0][0].generation_info
    assert info and info["chunks_reused"] == 1 and info["token_usage"]["completion_tokens"] == 2
    assert ChatKVPacket(llm=llm).engine.store.folder == tmp_path
    llm.engine.close()


@pytest.mark.parametrize("word", ["device", "dtype", "torch_dtype", "device_map", "engine", "model_kwargs"])
def test_what_a_pipeline_has_decided_already_is_refused_with_the_way_out(engine: KVPacketEngine, word: str):
    made = pipeline("text-generation", model=engine.backbone.model, tokenizer=engine.backbone.tokenizer)
    value = {"engine": engine, "model_kwargs": {"revision": "main"}}.get(word, "cpu")
    with pytest.raises(PromptError, match=rf"{word} came with a pipeline.*pass it to transformers' pipe"):
        KVPacketLLM(pipeline=made, **{word: value})


def test_what_makes_no_difference_to_a_pipelines_prompts_may_stay(backbone: Any):
    harmless = {"return_full_text": False, "truncation": True, "padding": False, "skip_special_tokens": True}
    made = pipeline("text-generation", model=backbone.model, tokenizer=backbone.tokenizer, **harmless)
    assert KVPacketLLM(pipeline=made, max_tokens=2).invoke("Hi")


def test_a_chat_model_may_name_its_text_models_folder_in_any_spelling(
    engine: KVPacketEngine, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    engine.backbone.model.save_pretrained(tmp_path / "model")
    engine.backbone.tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    named = KVPacketLLM(pipeline=pipeline("text-generation", model="./model"))
    backbone = engine.backbone
    nameless = KVPacketLLM(pipeline=pipeline("text-generation", backbone.model, tokenizer=backbone.tokenizer))
    for llm in (named, nameless, KVPacketLLM.from_model_id("model")):
        for folder in ("model", "./model", str(tmp_path / "model")):
            assert ChatKVPacket(llm=llm, model_id=folder).engine is llm.engine
    with pytest.raises(KVPacketError, match="model can have no effect"):
        ChatKVPacket(llm=named, model_id="other")


def test_a_tokenizer_beside_the_model_brings_its_template(engine: KVPacketEngine):
    class Tokenizer:
        chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}?"

    chat = ChatKVPacket(llm=KVPacketLLM(engine=engine), tokenizer=Tokenizer(), max_tokens=3)
    assert chat.invoke("Hi").usage_metadata["input_tokens"] == engine.count_tokens("Hi?")  # type: ignore[index]


async def test_the_faults_of_the_original_are_not_inherited(engine: KVPacketEngine):
    engine.encode(CHUNKS)
    chat = ChatKVPacket(llm=KVPacketLLM(engine=engine, max_tokens=24))
    message = chat.invoke(ASKED)
    assert message.text == engine.generate(ASKED_OF_ENGINE, GenerationSettings(24)).text  # no prompt before it
    assert message.usage_metadata and json.dumps(message.response_metadata)
    assert (await chat.ainvoke(ASKED)).text == message.text
    stop = across_tokens([chunk.text async for chunk in chat.astream(ASKED)])
    assert chat.invoke(ASKED, stop=[stop]).text == message.text.split(stop)[0]
    assert chat.bind(max_new_tokens=3).invoke(ASKED).usage_metadata["output_tokens"] == 3  # type: ignore[index]
    call = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}])
    assert chat.invoke([HumanMessage("?"), call, ToolMessage(CHUNKS[0], tool_call_id="1")]).text
