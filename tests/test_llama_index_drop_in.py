"""Scripts written for LlamaIndex's HuggingFaceLLM run with the import and the name of the class changed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
import torch
from llama_index.core import Settings
from llama_index_kvpacket import KVPacketLLM
from llama_index_samples import no_stray_loop  # noqa: F401

from kvpacket_rag import AnswerStream, Backbone, KVPacketEngine

SCRIPTS = Path(__file__).parent / "llama_index_scripts"
CHANGES = {
    "from llama_index.llms.huggingface import HuggingFaceLLM": "from llama_index_kvpacket import KVPacketLLM",
    "HuggingFaceLLM(": "KVPacketLLM(",
}
TOLD = re.compile(r"(\d+) of (\d+) prompt tokens came from packets of (\d+) chunks; (\d+) chunks missed")


@pytest.fixture(autouse=True)
def _settings_are_put_back() -> Iterator[None]:
    names = ("_llm", "_embed_model", "_node_parser", "_prompt_helper", "_transformations")
    before = {name: getattr(Settings, name) for name in names}
    tokenizer = llama_index.core.global_tokenizer
    yield
    for name, value in before.items():
        setattr(Settings, name, value)
    llama_index.core.global_tokenizer = tokenizer


@pytest.fixture
def run(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Runs a script with the tiny model; gives its names and what it logged of each call of the model."""
    backbone.model.save_pretrained(tmp_path / "model")
    backbone.tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("KVPACKET_CACHE", str(tmp_path))

    def run_script(name: str, model: str = str(tmp_path / "model")) -> tuple[dict[str, Any], list[list[int]]]:
        monkeypatch.setenv("MODEL", model)
        text = (SCRIPTS / name).read_text()
        for old, new in CHANGES.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        names: dict[str, Any] = {"__name__": "__main__"}
        with caplog.at_level(logging.INFO):
            exec(compile(text, name, "exec"), names)
        return names, [[int(number) for number in found] for found in TOLD.findall(caplog.text)]

    return run_script


def test_a_script_with_a_query_engine_answers_from_packets(run: Any, capsys: pytest.CaptureFixture[str]):
    names, calls = run("query_engine.py")
    llm = names["llm"]
    assert isinstance(llm, KVPacketLLM) and len(capsys.readouterr().out.splitlines()) >= 2
    assert [chunks for _, _, chunks, _ in calls] == [0, 2, 2] and [missed for *_, missed in calls] == [2, 0, 0]
    expected = sum(llm.engine.count_tokens(document.text) for document in names["documents"])
    assert calls[1][0] == calls[2][0] == expected and llm.last_usage["chunks_reused"] == 2
    assert llm.metadata.context_window == 2048 and not llm.metadata.is_chat_model


def test_a_script_with_a_chat_engine_answers_from_packets(run: Any, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    names, calls = run("chat_engine.py")
    llm = names["llm"]
    assert capsys.readouterr().out.strip() and llm.engine.backbone.model is names["model"]
    with_context = [chunks for _, _, chunks, missed in calls if chunks or missed]
    assert with_context == [0, 2, 2] and len(calls) == 6  # one completion, three answers, two condensed questions
    assert llm.metadata.is_chat_model and llm.model_name == names["name"]


@pytest.mark.model
def test_a_script_is_answered_by_the_real_model_as_its_engine_answers_from_packets(
    run: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KVPACKET_CACHE")  # where the packaged weights are converted already
    asked: list[tuple[Any, dict[str, Any], AnswerStream]] = []
    stream = KVPacketEngine.stream

    def note(engine: KVPacketEngine, prompt: Any, settings: Any, **given: Any) -> AnswerStream:
        asked.append((prompt, {"settings": settings, **given}, answer := stream(engine, prompt, settings, **given)))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(KVPacketEngine, "stream", note)
        names, calls = run("query_engine.py", "smollm2-135m-instruct")
    assert [chunks for _, _, chunks, _ in calls] == [0, 2, 2] and all(read < whole for read, whole, _, _ in calls)
    for prompt, given, streamed in asked:  # the core alone, from the same packets
        answer = names["llm"].engine.generate(prompt, **given)
        assert answer.token_ids == streamed.answer.token_ids and answer.usage.chunks_reused == 2
        assert answer.text.strip()
