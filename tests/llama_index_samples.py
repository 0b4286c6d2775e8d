"""An embedding model for tests of the LlamaIndex integration: texts that share words are near each other."""

from __future__ import annotations

import asyncio
import inspect
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index_kvpacket import KVPacketVectorStore

DIM = 64
QUESTION = "Who signed the lease of the harbour office?"


@pytest.fixture(autouse=True)
def no_stray_loop(request: pytest.FixtureRequest) -> None:
    """LlamaIndex's synchronous code opens an event loop and leaves it open, unless it is told that there is none."""
    if not inspect.iscoroutinefunction(request.function):
        asyncio.set_event_loop(None)


def embed(text: str) -> list[float]:
    """Counts of words, hashed into a few places; never zero."""
    vector = [0.01] * DIM
    for word in re.findall(r"\w+", text.lower()):
        vector[zlib.crc32(word.encode()) % DIM] += 1.0
    return vector


class WordEmbedding(BaseEmbedding):
    """:func:`embed` as LlamaIndex wants it."""

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return embed(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return embed(query)


def node(node_id: str, text: str, document: str = "", /, **metadata: object) -> TextNode:
    """A node with its embedding."""
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)} if document else {}
    return TextNode(id_=node_id, text=text, embedding=embed(text), metadata=metadata, relationships=source)


def nodes(texts: Sequence[str] = CHUNKS, document: str = "doc") -> list[TextNode]:
    """One node a text, named by number."""
    return [node(f"n{number}", text, document, number=number) for number, text in enumerate(texts)]


def documents() -> list[Document]:
    """One document a chunk, short enough to stay whole."""
    return [Document(text=text, id_=f"d{number}", metadata={"page": number}) for number, text in enumerate(CHUNKS)]


def index_of(store: KVPacketVectorStore, given: Sequence[TextNode]) -> VectorStoreIndex:
    """An index over nodes."""
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(list(given), storage_context=context, embed_model=WordEmbedding())


@dataclass(frozen=True)
class ChunkKind:
    """Two chunks with something in them that prompts, templates or tokenizers may change."""

    name: str
    texts: tuple[str, str]
    settings: dict[str, Any] = field(default_factory=dict)

    def nodes(self) -> list[TextNode]:
        """The chunks as nodes."""
        return [
            TextNode(id_=f"{self.name} {number}", text=text, embedding=embed(text), **self.settings)
            for number, text in enumerate(self.texts)
        ]


_FACTS = ("The harbour office was leased by Ada Marlow", "The lease of the office ends in March 2028")
_META: dict[str, Any] = {"metadata": {"file_path": "/files/lease.txt", "page": 4}}


def _kind(name: str, pattern: str, **settings: Any) -> ChunkKind:
    return ChunkKind(name, (pattern.format(_FACTS[0]), pattern.format(_FACTS[1])), settings)


CHUNK_KINDS = [
    _kind("plain", "{} and nobody has asked why."),
    ChunkKind("duplicate texts", (_FACTS[0], _FACTS[0])),
    _kind("multi-line", "{}.\n\n\n- first\tpoint\n- second   point\n\nEnd."),
    _kind("CRLF and lone CR", "{}.\r\nSecond line.\rThird line."),
    _kind("quotes, backslashes", "{}, 'she' said, \"in C:\\new\\table\" \\n."),
    _kind(
        "unicode",
        "{}: cafe\u0301 \U0001f469\u200d\U0001f469\u200d\U0001f467 \u05e9\u05dc\u05d5\u05dd \u6e2f\u53e3 "
        "a\u200bb c\u00a0d\u2028e.",
    ),
    _kind("braces", "{} {{context_str}} {{{{ x }}}} {{% if y %}} {{query_str}} {{0}}."),
    _kind("trailing white space", "{}.  \n\n"),
    _kind("leading white space", "\n  {}."),
    _kind("wide space at an edge", "\u00a0\u3000{}.\u3000"),
    _kind("byte order mark at an edge", "\ufeff{}.\ufeff"),
    _kind("with metadata", "{}.\nAnd so on. ", **_META),
    _kind("own text_template", " {}.\n", text_template="[{content}]\n({metadata_str})", **_META),
    _kind("metadata kept from the model", "{}.", excluded_llm_metadata_keys=["file_path", "page"], **_META),
]
