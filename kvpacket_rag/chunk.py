"""A chunk of text to retrieve, and a chunk that was retrieved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_MATCH_TOKENS = 16  # a shorter text stands in prompts by chance, so it is not looked for, nor worth a chunk


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document, as it is retrieved and put before the model.

    Attributes:
        chunk_id: unique in an index; the name under which the chunk owns its packet.
        text: the text as the reader of the document gave it.
        document_id: the document it was cut from; deleting the document deletes the chunk.
        metadata: JSON-serialisable facts kept beside the text; they never reach a packet.
    """

    chunk_id: str
    text: str
    document_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """How a person would call its document, and the page where one is known."""
        title = str(self.metadata.get("title") or self.document_id)
        page = self.metadata.get("page")
        return f"{title}, page {page}" if page else title


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved chunk.

    Attributes:
        chunk: what was found.
        score: cosine similarity to the question, in [-1, 1].
        packet_id: the packet that holds the chunk's keys and values.
    """

    chunk: Chunk
    score: float
    packet_id: str

    def as_source(self) -> dict[str, Any]:
        """What answers say of where they come from: names and score, no text."""
        return {
            "document_id": self.chunk.document_id,
            "chunk_id": self.chunk.chunk_id,
            "title": self.chunk.title,
            "score": self.score,
            "packet_id": self.packet_id,
        }
