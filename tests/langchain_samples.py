"""Documents, embeddings and messages for the tests of the LangChain classes."""

from __future__ import annotations

import itertools
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from kvpacket_rag import KVPacketEngine, Message

QUESTION = "Who signed the lease of the harbour office?"


class WordEmbeddings(Embeddings):
    """Counts words: texts are near when they share some."""

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += texts
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        vector = np.full(64, 1e-3)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 64] += 1
        return [float(value) for value in vector]


def documents() -> list[Document]:
    return [Document(id=f"d{i}", page_content=text, metadata={"row": i}) for i, text in enumerate(CHUNKS)]


def chat_about(*chunks: str) -> tuple[list[BaseMessage], list[Message]]:
    """The same chat in LangChain's messages and in the engine's."""
    text = "\n\n".join([*chunks, QUESTION])
    return (
        [SystemMessage("Answer briefly."), HumanMessage(text)],
        [Message("system", "Answer briefly."), Message("user", text)],
    )


def across_tokens(pieces: list[str]) -> str:
    """Two letters of an answer, the end of one token and the beginning of the next, that were not seen before."""
    for i in range(1, len(pieces) - 1):
        pair = pieces[i][-1:] + pieces[i + 1][:1]
        before = "".join(pieces[: i + 1])
        if len(pair) == 2 and "\ufffd" not in pair and not any(pair in part for part in (before, *pieces)):
            return pair
    raise AssertionError(f"no two tokens to stop between in {pieces}")


@contextmanager
def lent_contexts(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Which contexts of the engine are lent out, as it goes."""
    pool, lent = engine.backbone.pool, set[int]()
    take, give_back = pool.take, pool.give_back

    def taken(*args: int, **kwargs: int):  # type: ignore[no-untyped-def]
        context = take(*args, **kwargs)
        lent.add(id(context))
        return context

    def given(context):  # type: ignore[no-untyped-def]
        lent.discard(id(context))
        give_back(context)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "take", taken)
        patch.setattr(pool, "give_back", given)
        yield lent


def slow(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """Make every token take time; gives when each began."""
    step, began = engine.backbone.step, list[float]()

    def late(*args: Any) -> Any:
        began.append(time.perf_counter())
        time.sleep(seconds)
        return step(*args)

    monkeypatch.setattr(engine.backbone, "step", late)
    return began


def broken(engine: KVPacketEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the third token fail."""
    step, count = engine.backbone.step, itertools.count(2)

    def fail(*args: Any) -> Any:
        if next(count) == 3:
            raise RuntimeError("no third token")
        return step(*args)

    monkeypatch.setattr(engine.backbone, "step", fail)
