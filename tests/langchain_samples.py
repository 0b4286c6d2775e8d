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
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from kvpacket_rag import KVPacketEngine, Message

QUESTION = "Who signed the lease of the harbour office?"

# Small re-creations of templates that take tools: Qwen's, with tags around a call, and Llama's, with the bare JSON.
QWEN_TOOLS = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nWrite a call as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not tools -%}{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role -}}
{%- if message.content -%}{{- '\\n' + message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
LLAMA_TOOLS = """\
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|im_start|>' + role + '\\n\\n' -}}
{%- if tools and loop.first -%}
{%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
{%- endif -%}
{%- if message.tool_calls -%}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' -}}
{{- message.tool_calls[0].function.arguments | tojson + '}' -}}
{%- elif message.role == 'tool' and (message.content is mapping or message.content is iterable) -%}
{{- message.content | tojson -}}
{%- else -%}
{{- message.content | trim -}}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n\\n' -}}{%- endif -%}
"""


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


class Reused(BaseCallbackHandler):
    """Hears of every answer how many chunks were taken from packets, and how many were missed."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.misses: list[list[dict[str, str]]] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        generation = response.generations[0][0]
        is_chat = isinstance(generation, ChatGeneration)
        facts = generation.message.response_metadata if is_chat else generation.generation_info or {}
        self.chunks.append(facts["chunks_reused"])
        self.misses.append(facts["misses"])


def script(monkeypatch: pytest.MonkeyPatch, engine: KVPacketEngine, *answers: str) -> None:
    """Make the model write these answers, one a call, whatever it is asked."""
    left = iter(answers)

    class Script:
        def __init__(self, *_: Any) -> None:
            self.ids = iter([*engine.token_ids(next(left)), *engine.backbone.eos_ids])

        def pick(self, _: Any) -> int:
            return next(self.ids)

    monkeypatch.setattr("kvpacket_rag.writing.Sampler", Script)


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
    give_back = pool.give_back

    def noting(take: Any) -> Any:
        def taken(*args: Any, **kwargs: Any) -> Any:
            if context := take(*args, **kwargs):
                lent.add(id(context))
            return context

        return taken

    def given(context):  # type: ignore[no-untyped-def]
        lent.discard(id(context))
        give_back(context)

    with monkeypatch.context() as patch:
        for name in ("take", "take_filled"):
            patch.setattr(pool, name, noting(getattr(pool, name)))
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
