"""Documents to chunks and back, and to the text that a prompt holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from kvpacket_rag import Chunk, StoreError

Filter = Mapping[str, Any] | Callable[[Document], bool]


def format_docs(documents: Iterable[Document]) -> str:
    """The documents' texts with a blank line between them, every one whole: its packet is found by its text."""
    return "\n\n".join(document.page_content for document in documents)


def to_chunks(
    texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> list[Chunk]:
    """A chunk for each text; its metadata's ``source``, if any, is the document it was cut from.

    Raises:
        StoreError: there is not one of each.
    """
    for what, values in (("metadatas", metadatas), ("ids", ids)):
        if values is not None and len(values) != len(texts):
            raise StoreError(f"{len(values)} {what} came with {len(texts)} texts; give one for each, or none at all")
    named = [name or str(uuid.uuid4()) for name in ids or [None] * len(texts)]
    facts = metadatas or [{}] * len(texts)
    return [
        Chunk(name, text, str(fact.get("source", "")), dict(fact))
        for name, text, fact in zip(named, texts, facts, strict=True)
    ]


def to_document(chunk: Chunk) -> Document:
    """A document of its own, that callers may change."""
    return Document(id=chunk.chunk_id, page_content=chunk.text, metadata=dict(chunk.metadata))


def to_condition(wanted: Filter | None) -> Callable[[Chunk], bool] | None:
    """A filter as the index takes it.

    Args:
        wanted: metadata that a document must have with equal values, or a function of the document.

    Raises:
        StoreError: the filter is none, or holds operators such as ``{"year": {"$gt": 2020}}``.
    """
    if wanted is None:
        return None
    if callable(wanted):
        ask = wanted
        return lambda chunk: bool(ask(to_document(chunk)))
    if not isinstance(wanted, Mapping):
        raise StoreError(
            f"the filter is a {type(wanted).__name__}; pass a dict of metadata, or a function of a Document"
        )
    for key, value in wanted.items():
        if key.startswith("$") or (isinstance(value, Mapping) and any(str(name).startswith("$") for name in value)):
            raise StoreError(
                f"the filter has an operator at {key!r}; a dict compares for equality alone, so pass a function of a "
                "Document for anything else"
            )
    items = list(wanted.items())
    return lambda chunk: all(key in chunk.metadata and chunk.metadata[key] == value for key, value in items)
