"""Arguments of wrong types are refused by what they should be, before anything is done."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CHUNKS
from pipeline_samples import pipeline

from kvpacket_rag.chat import Message, ToolCall
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import AdapterError, DocumentError, PromptError
from kvpacket_rag.reading import Reuse

CALL = ToolCall("search", {"text": "lease"})


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "the prompt is a NoneType; pass a string, or a list of Message"),
        (5, "the prompt is a int"),
        (Message("user", "hi"), "the prompt is a Message"),
        ((message for message in [Message("user", "hi")]), "the prompt is a generator"),
        ([], "the chat is no messages"),
        (["hi"], "message 0 is a str"),
        ([Message("user", "hi"), {"role": "user"}], "message 1 is a dict"),
        ([Message("user", None)], "the content of message 0 is a NoneType"),  # type: ignore[arg-type]
        ([Message("assistant", "", None)], "the tool_calls of message 0 are None"),  # type: ignore[arg-type]
        ([Message("assistant", "", ({"name": "f"},))], "pass a tuple of ToolCall"),  # type: ignore[arg-type]
        ([Message("assistant", "", (ToolCall("f", "x"),))], "expected a name and arguments"),  # type: ignore[arg-type]
        ([Message("user", "", (CALL,))], "only the assistant calls tools"),
    ],
)
def test_a_prompt_that_is_none_is_refused(engine: KVPacketEngine, prompt: Any, said: str):
    with pytest.raises(PromptError, match=said.replace("(", r"\(")):
        engine.generate(prompt)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"settings": {"temperature": 0}}, "settings is a dict; pass GenerationSettings"),
        ({"settings": 0}, "settings is a int"),
        ({"reuse": "hints"}, "reuse is a str; pass Reuse"),
        ({"reuse": False}, "reuse is a bool"),
        ({"policy": None}, "policy is None"),
        ({"template_kwargs": "thinking"}, "template_kwargs is 'thinking'"),
    ],
)
def test_a_request_of_other_types_is_refused(engine: KVPacketEngine, options: dict[str, Any], said: str):
    with pytest.raises(PromptError, match=said):
        engine.generate("Who?", **options)


@pytest.mark.parametrize(
    ("hints", "said"), [("abc", "a str"), (None, "a NoneType"), ((5,), "holds 5"), ({"a"}, "a set")]
)
def test_hints_are_ids_one_by_one(hints: Any, said: str):
    with pytest.raises(PromptError, match=said):
        Reuse(hints=hints)


@pytest.mark.parametrize(
    ("texts", "owners", "said"),
    [
        (CHUNKS[0], None, "texts is a str; pass a list"),
        ([CHUNKS[0], None], None, "texts holds a NoneType"),
        (CHUNKS[:1], "a", "owners is a str"),
        (CHUNKS[:1], [1], "owners holds a int"),
        (CHUNKS[:2], ["a"], "1 owners for 2 texts"),
    ],
)
def test_chunks_and_owners_are_lists_of_strings(engine: KVPacketEngine, texts: Any, owners: Any, said: str):
    with pytest.raises(PromptError, match=said):
        engine.encode(texts, owners)
    assert not len(engine.store)


def test_an_engine_takes_an_adapter_and_a_pipeline_documents_and_questions(backbone: Any, tmp_path: Any):
    with pytest.raises(AdapterError, match="adapter is a dict"):
        KVPacketEngine(backbone, adapter={})  # type: ignore[arg-type]
    with pipeline(backbone, tmp_path) as rag:
        with pytest.raises(DocumentError, match=r"item 0 is a str; pass Document"):
            rag.add("a.txt")  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="the question is a NoneType"):
            rag.retrieve(None)  # type: ignore[arg-type]
