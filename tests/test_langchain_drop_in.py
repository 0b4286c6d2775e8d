"""Scripts written for langchain-huggingface's local classes run with the import and the name of the class changed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_kvpacket import ChatKVPacket, KVPacketLLM

from kvpacket_rag import Backbone, GenerationSettings, KVPacketEngine, Message

SCRIPTS = Path(__file__).parent / "langchain_scripts"
CHANGES = {
    "from langchain_huggingface import": "from langchain_kvpacket import",
    "ChatHuggingFace": "ChatKVPacket",
    "HuggingFacePipeline": "KVPacketLLM",
}
TOLD = re.compile(r"(\d+) of (\d+) prompt tokens came from packets of (\d+) chunks; (\d+) chunks missed")
SETTINGS = GenerationSettings(24, repetition_penalty=1.03)
Run = Callable[[str], tuple[dict[str, Any], list[list[int]]]]


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Run:
    """Runs a script with its imports and class names changed; gives its names and what it logged of each answer."""

    def run_script(name: str) -> tuple[dict[str, Any], list[list[int]]]:
        text = (SCRIPTS / name).read_text()
        for old, new in CHANGES.items():
            text = text.replace(old, new)
        names: dict[str, Any] = {"__name__": "__main__"}
        with caplog.at_level(logging.INFO):
            exec(compile(text, name, "exec"), names)
        return names, [[int(number) for number in found] for found in TOLD.findall(caplog.text)]

    return run_script


@pytest.fixture
def tiny_model(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone.model.save_pretrained(tmp_path / "model")
    backbone.tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))


def as_text(names: dict[str, Any], question: str) -> str:
    """The prompt of the text model, made by the script's own parts."""
    context = names["format_docs"](names["retriever"].invoke(question))
    return names["prompt"].format(context=context, question=question)


def as_chat(names: dict[str, Any], question: str) -> list[Message]:
    context = "\n\n".join(document.page_content for document in names["retriever"].invoke(question))
    return [Message("system", f"Answer from:\n\n{context}"), Message("user", question)]


def answered_by(engine: KVPacketEngine, names: dict[str, Any], prompt: Any) -> list[str]:
    """The engine's own answers, which come from packets too."""
    answers = [engine.generate(prompt(names, question), SETTINGS) for question in names["questions"]]
    assert [answer.usage.chunks_reused for answer in answers] == [2] * 3
    return [answer.text for answer in answers]


def test_a_script_with_a_text_model_answers_from_packets(
    tiny_model: None, run: Run, capsys: pytest.CaptureFixture[str]
):
    names, calls = run("pipeline.py")
    llm = names["llm"]
    assert isinstance(llm, KVPacketLLM) and capsys.readouterr().out.strip()
    assert [chunks for _, _, chunks, _ in calls] == [0, 2, 2, 2] and [missed for *_, missed in calls] == [2, 0, 0, 0]
    assert calls[1][0] > calls[1][1] / 4 and llm.last_usage["chunks_reused"] == 2
    assert names["answers"] == answered_by(llm.engine, names, as_text)


def test_a_script_with_a_chat_model_answers_from_packets(
    tiny_model: None, run: Run, capsys: pytest.CaptureFixture[str]
):
    names, calls = run("chat.py")
    chat = names["chat"]
    assert isinstance(chat, ChatKVPacket) and "'chunks_reused': 2" in capsys.readouterr().out
    assert [chunks for _, _, chunks, _ in calls] == [0, 2, 2] and [missed for *_, missed in calls] == [2, 0, 0]
    assert chat.last_usage["chunks_reused"] == 2
    assert names["answers"] == answered_by(chat.engine, names, as_chat)


@pytest.mark.model
@pytest.mark.parametrize(("script", "model", "prompt"), [("pipeline.py", "llm", as_text), ("chat.py", "chat", as_chat)])
def test_a_script_is_answered_by_the_real_model_as_its_engine_answers_from_packets(
    script: str, model: str, prompt: Any, run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
    names, calls = run(script)
    assert [chunks for _, _, chunks, _ in calls][1:] == [2] * (len(calls) - 1)
    assert names["answers"] == answered_by(names[model].engine, names, prompt) and all(names["answers"])
