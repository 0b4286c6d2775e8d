"""A LangChain retriever whose documents all have packets, from any vector store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict, Field, model_validator

from kvpacket_rag import DeviceError, DocumentError, KVPacketEngine, StoreError
from langchain_kvpacket.plain_errors import PlainErrors

logger = logging.getLogger(__name__)

_OPTIONS = {
    "similarity": ("k", "filter"),
    "mmr": ("k", "filter", "fetch_k", "lambda_mult"),
    "similarity_score_threshold": ("k", "filter", "score_threshold"),
}
_FIELDS = dict.fromkeys(name for names in _OPTIONS.values() for name in names)


class KVPacketRetriever(PlainErrors, BaseRetriever):
    """Retriever that leaves no document without a packet.

    Over a :class:`KVPacketVectorStore` the packets are there, but for those that were evicted. Over any other vector
    store, such as Chroma or pgvector, a chunk gets its packet when it is first retrieved, and keeps it, in a
    folder too.

    Setup:
        ``pip install "kvpacket-rag[langchain]"``.

    Key init args:
        vectorstore: any LangChain vector store.
        engine: of the model that answers; a KVPacketVectorStore brings its own.
        k: how many documents.
        search_type: "similarity", "mmr" or "similarity_score_threshold".
        filter, fetch_k, lambda_mult, score_threshold: of the search.
        search_kwargs: these and any others that the vector store's search takes, as ``as_retriever`` has them.

    Instantiate:
        >>> retriever = KVPacketRetriever(vectorstore=store, k=4)  # doctest: +SKIP
        >>> retriever = KVPacketRetriever(vectorstore=chroma, engine=chat.engine)  # doctest: +SKIP
        >>> retriever = KVPacketRetriever(vectorstore=store, search_kwargs={"k": 4})  # doctest: +SKIP

    Usage:
        A call may have options of its own.

        >>> retriever.invoke("Who signed the lease?", k=2)  # doctest: +SKIP

    Use in a chain:
        >>> {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | chat  # doctest: +SKIP
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    vectorstore: VectorStore
    engine: KVPacketEngine | None = Field(default=None, exclude=True, repr=False)
    """None for the vector store's own."""
    search_type: Literal["similarity", "mmr", "similarity_score_threshold"] = "similarity"
    k: int = Field(default=4, ge=1)
    filter: Any = None
    """As the vector store takes it; None for all documents."""
    fetch_k: int = Field(default=20, ge=1)
    """How many documents ``"mmr"`` chooses from."""
    lambda_mult: float = Field(default=0.5, ge=0, le=1)
    """For ``"mmr"``: 1 counts nearness alone, 0 difference alone."""
    score_threshold: float | None = Field(default=None, ge=0, le=1)
    """Least relevance for ``"similarity_score_threshold"``."""
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the vector store's search; those that have a field here are taken for it."""

    @model_validator(mode="before")
    @classmethod
    def _take_search_kwargs(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = dict(values)
        packed = given.pop("search_kwargs", None) or {}
        if not isinstance(packed, Mapping):
            raise StoreError(f"search_kwargs is a {type(packed).__name__}, expected a dict such as {{'k': 4}}")
        twice = [name for name in _FIELDS if name in packed and name in given and packed[name] != given[name]]
        if twice:
            raise StoreError(f"{', '.join(twice)} is given twice, by itself and in search_kwargs; leave one out")
        given |= {name: value for name, value in packed.items() if name in _FIELDS}
        if unknown := sorted(given.keys() - cls.model_fields.keys()):
            raise StoreError(
                f"there is no {', '.join(unknown)} here; it takes {', '.join(_FIELDS)}, and search_kwargs for whatever "
                "else the vector store's search takes"
            )
        if not isinstance(store := given.get("vectorstore"), VectorStore):
            way = ", whose vector store is meant: pass retriever.vectorstore" if hasattr(store, "vectorstore") else ""
            raise StoreError(f"vectorstore is a {type(store).__name__}, expected a LangChain vector store{way}")
        if hasattr(given.get("engine"), "shared_engine"):
            raise StoreError(f"engine is a {type(given['engine']).__name__}; pass its engine, as in engine=chat.engine")
        return {**given, "search_kwargs": {name: value for name, value in packed.items() if name not in _FIELDS}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.search_type == "similarity_score_threshold" and self.score_threshold is None:
            raise StoreError("search_type 'similarity_score_threshold' needs a score_threshold, from 0 to 1")
        if self.engine is None:
            self.engine = getattr(self.vectorstore, "engine", None)
        if not isinstance(self.engine, KVPacketEngine):
            raise StoreError(
                f"a {type(self.vectorstore).__name__} makes no packets; pass the engine of the model that answers, as "
                "in KVPacketRetriever(vectorstore=..., engine=chat.engine)"
            )
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        search = self._with(options)
        return search._encoded(self.vectorstore.search(query, search.search_type, **search._arguments()))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        search = self._with(options)
        found = await self.vectorstore.asearch(query, search.search_type, **search._arguments())
        return await run_in_executor(None, search._encoded, found)

    def _with(self, options: dict[str, Any]) -> Self:
        """This retriever with the options of one call, which are checked like those of the constructor."""
        if not options:
            return self
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        if isinstance(packed := options.get("search_kwargs"), Mapping):
            fields = {name: value for name, value in fields.items() if name not in packed}
            options = {**options, "search_kwargs": {**self.search_kwargs, **packed}}
        return type(self)(**{**fields, **options})

    def _arguments(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _OPTIONS[self.search_type]}
        return {**self.search_kwargs, **{name: value for name, value in values.items() if value is not None}}

    def _encoded(self, documents: list[Document]) -> list[Document]:
        """The documents, every one with its packet."""
        for text in {document.page_content: None for document in documents}:
            if self.engine is None or not text.strip():
                continue
            try:
                self.engine.encode([text])
            except (DeviceError, DocumentError, StoreError) as error:
                logger.warning("a retrieved document has no packet and is read in full: %s", str(error))
        return documents
