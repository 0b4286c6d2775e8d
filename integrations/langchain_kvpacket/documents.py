"""Documents to chunks and back, and to the text that a prompt holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from kvpacket_rag import Chunk, PromptError, StoreError
from langchain_kvpacket.checks import listed, require_text

_NODE = "_node_content"
_OF_LLAMA_INDEX = (_NODE, "_node_type", "document_id", "doc_id", "ref_doc_id")
Filter = Mapping[str, Any] | Callable[[Document], bool]


def format_docs(documents: Iterable[Document]) -> str:
    """The documents' texts with a blank line between them, every one whole: its packet is found by its text."""
    return "\n\n".join(_text(document) for document in documents)


def _text(document: Any) -> str:
    if not isinstance(document, Document):
        raise PromptError(f"format_docs was given a {type(document).__name__}, expected Documents, as retrievers find")
    return document.page_content


def to_chunks(
    texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> list[Chunk]:
    """A chunk for each text; its metadata's ``source``, if any, is the document it was cut from.

    Raises:
        StoreError: there is not one of each, or one is of another kind.
    """
    named = [None] * len(texts) if ids is None else listed("ids", ids)
    facts = [{}] * len(texts) if metadatas is None else listed("metadatas", metadatas)
    for what, values in (("metadatas", facts), ("ids", named)):
        if len(values) != len(texts):
            raise StoreError(f"{len(values)} {what} came with {len(texts)} texts; give one for each, or none at all")
    return [_chunk(*given) for given in zip(texts, facts, named, strict=True)]


def _chunk(text: Any, metadata: Any, name: Any) -> Chunk:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise StoreError(f"the metadata of a text is a {type(metadata).__name__}, expected a dict")
    own = dict(metadata or {})
    chunk_id = str(uuid.uuid4()) if name in (None, "") else require_text("the id of a text", name)
    return Chunk(chunk_id, require_text("one of the texts", text), str(own.get("source", "")), own)


def to_document(chunk: Chunk) -> Document:
    """A document of its own, that callers may change."""
    return Document(id=chunk.chunk_id, page_content=chunk.text, metadata=_metadata(chunk))


def _metadata(chunk: Chunk) -> dict[str, Any]:
    """What users wrote; of a row that LlamaIndex wrote, without what it keeps there for itself."""
    own = _OF_LLAMA_INDEX if _NODE in chunk.metadata else ()
    return {name: value for name, value in chunk.metadata.items() if name not in own}


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
