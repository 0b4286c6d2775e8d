"""Arguments of the vector store and the retriever that Python would take for something else, refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.embeddings import Embeddings

from kvpacket_rag import KVPacketEngine, StoreError

# Options of an engine for an index in a folder, which says itself where the packets are; and of such an index.
LOADING = tuple(
    {*inspect.signature(KVPacketEngine.load).parameters, "remote", "cache_bytes", "namespace", "kind"}
    - {"model", "store"}
)
# Of other kinds of search, which retrievers pass to all; and what LangChain's index() passes while adding.
_HARMLESS = ("fetch_k", "lambda_mult", "score_threshold", "batch_size")


def require_engine(engine: Any) -> KVPacketEngine:
    """An engine; not a model, which has one.

    Raises:
        StoreError: it is none.
    """
    if isinstance(engine, KVPacketEngine):
        return engine
    way = "pass its engine, as in engine=chat.engine" if hasattr(engine, "shared_engine") else "pass a KVPacketEngine"
    raise StoreError(f"engine is a {type(engine).__name__}; {way}")


def require_embeddings(embedding: Any) -> Embeddings:
    """LangChain embeddings.

    Raises:
        StoreError: they are none.
    """
    if isinstance(embedding, Embeddings) or hasattr(embedding, "embed_query"):
        found: Embeddings = embedding
        return found
    raise StoreError(
        f"embedding is a {type(embedding).__name__}, expected LangChain embeddings such as KVPacketEmbeddings()"
    )


def listed(name: str, values: Any) -> list[Any]:
    """Several values as a list; of a single text the letters would be taken for them.

    Raises:
        StoreError: it is a text, or nothing to go through.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise StoreError(f"{name} is a {type(values).__name__}, expected a list; of a single one, pass a list of it")
    return list(values)


def require_text(name: str, value: Any) -> str:
    """A text.

    Raises:
        StoreError: it is none.
    """
    if isinstance(value, str):
        return value
    raise StoreError(f"{name} is a {type(value).__name__}, expected a text")


def require_count(name: str, value: Any) -> int:
    """A whole number, at least 1.

    Raises:
        StoreError: it is none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise StoreError(f"{name} is {value!r}, expected a whole number, at least 1")


def known_options(method: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse options of an engine that there are not.

    Raises:
        StoreError: there is one.
    """
    if unknown := sorted(options.keys() - set(known)):
        takes = ", ".join(sorted(known))
        raise StoreError(f"{method} has no option {', '.join(unknown)}; of an engine's it takes {takes}")


def refuse(kwargs: Mapping[str, Any]) -> None:
    """An argument that has no effect is an error: a misspelt filter would let through what it was to hold back.

    Raises:
        StoreError: there is one.
    """
    if unknown := sorted(kwargs.keys() - set(_HARMLESS)):
        raise StoreError(f"unknown argument {', '.join(unknown)}; a search takes k, filter, fetch_k and lambda_mult")
