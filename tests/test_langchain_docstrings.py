"""The docstrings of the LangChain classes have the sections that LangChain's integrations have, and say what is so."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_kvpacket import ChatKVPacket, KVPacketLLM, KVPacketRetriever, KVPacketVectorStore

from kvpacket_rag import KVPacketEngine

MODELS = ["Setup", "Key init args — completion params", "Key init args — engine params", "Instantiate", "Invoke"]
MODELS += ["Stream", "Async", "Token usage", "Response metadata"]
SECTIONS: dict[type, list[str]] = {
    ChatKVPacket: [*MODELS, "Tool calling"],
    KVPacketLLM: MODELS,
    KVPacketVectorStore: ["Setup", "Key init args", "Instantiate", "Add and delete", "Search", "Async"],
    KVPacketRetriever: ["Setup", "Key init args", "Instantiate", "Usage", "Use in a chain"],
}
KINDS = pytest.mark.parametrize("kind", SECTIONS)


def sections(kind: type) -> dict[str, str]:
    """Titles, and what stands below each until the next."""
    text = inspect.cleandoc(kind.__doc__ or "")
    _, *rest = re.split(r"^(\w[^\n]*):$", text, flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


@KINDS
def test_a_class_has_every_section_with_something_in_it(kind: type):
    found = sections(kind)
    assert all(found.get(title, "").strip() for title in SECTIONS[kind])


@KINDS
def test_every_argument_it_names_is_one_that_the_class_takes(kind: type):
    named = [
        name
        for title, text in sections(kind).items()
        if title.startswith("Key init args")
        for line in re.findall(r"^ {4}(\w[\w, ]*):", text, re.MULTILINE)
        for name in line.split(", ")
    ]
    fields = getattr(kind, "model_fields", {})
    taken = {*fields, *(field.alias for field in fields.values()), *inspect.signature(kind).parameters}
    taken |= {"llm"} if kind is ChatKVPacket else set()
    assert len(named) > 2 and set(named) <= taken


@KINDS
def test_examples_are_python(kind: type):
    for title, text in sections(kind).items():
        lines = re.findall(r"^ +(?:>>>|\.\.\.) ?(.*)$", text, re.MULTILINE)
        compile("\n".join(lines), title, "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT


@pytest.mark.parametrize("kind", [ChatKVPacket, KVPacketLLM])
def test_an_answer_has_the_metadata_that_are_named(engine: KVPacketEngine, kind: Any):
    engine.encode(CHUNKS)
    asked = f"{CHUNKS[1]}\n\nWho signed it?"
    model = kind(engine=engine, max_tokens=2)
    if kind is ChatKVPacket:
        facts = model.invoke(asked).response_metadata
    else:
        facts = model.generate([asked]).generations[0][0].generation_info
    text = sections(kind)["Response metadata"].replace("\n", " ")
    (told,) = re.findall(r"has ([\w,() ]+?)\.", text)
    names = re.sub(r"\([^)]*\)", "", told).replace(" and ", ", ").split(",")
    assert {name.strip() for name in names} <= facts.keys() and len(names) > 6
