"""An embedding model for tests of the LlamaIndex integration: texts that share words are near each other."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from conftest import CHUNKS
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode

DIM = 64
QUESTION = "Who signed the lease of the harbour office?"


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
