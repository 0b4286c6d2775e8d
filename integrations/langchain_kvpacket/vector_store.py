"""A LangChain vector store that makes a packet of every text it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from kvpacket_rag import KVPacketEngine, KVPacketError, KVPacketRAG, PacketIndex, StoreError
from kvpacket_rag.namespace import local_path
from langchain_kvpacket.checks import (
    LOADING,
    known_options,
    listed,
    refuse,
    require_count,
    require_embeddings,
    require_engine,
    require_text,
)
from langchain_kvpacket.chunk_library import ChunkLibrary
from langchain_kvpacket.documents import Filter, to_chunks, to_condition, to_document
from langchain_kvpacket.embeddings import KVPacketEmbeddings, LangChainEmbedder
from langchain_kvpacket.lazy_engine import OPTION_NAMES, EngineOptions, load_engine, only_engine


class KVPacketVectorStore(VectorStore):
    """Texts with their embeddings and packets, searched by cosine.

    Adding a text makes its packet, deleting it deletes the packet when no other text needs it, and a
    model over the same :attr:`engine` reads what is retrieved from packets.

    Setup:
        ``pip install "kvpacket-rag[langchain]"``.

    Key init args:
        embedding: any LangChain embeddings, such as :class:`KVPacketEmbeddings`.
        engine: makes the packets and keeps them in its store; None for the one that models here are over.
        index: of rows and vectors; in memory by default. :meth:`open` keeps all in one folder.

    Instantiate:
        >>> store = KVPacketVectorStore.open("library")  # doctest: +SKIP

    Add and delete:
        >>> store.add_documents(documents, ids=names)  # doctest: +SKIP
        >>> store.delete(names[:1])                    # doctest: +SKIP

    Search:
        >>> store.similarity_search("Who signed the lease?", k=4)  # doctest: +SKIP

    Async:
        >>> await store.asimilarity_search("Who signed the lease?", k=4)  # doctest: +SKIP

    Use in a chain:
        >>> chat = ChatKVPacket.from_engine(store.engine)     # doctest: +SKIP
        >>> retriever = store.as_retriever(search_kwargs={"k": 4})  # doctest: +SKIP
    """

    def __init__(
        self, embedding: Embeddings, engine: KVPacketEngine | None = None, index: PacketIndex | None = None
    ) -> None:
        """Over an engine and an index that are there already.

        Args:
            embedding: of texts and questions.
            engine: None for the one that the models of this process are over, the default model's if there are none.
            index: None for an empty one in memory.

        Raises:
            PacketMismatchError: the index was built with another model, adapter or dtype.
            PacketNotFoundError: the engine's store holds no packet of the index.
            StoreError: it was built with other embeddings, or no engine is given and there are several.
        """
        self._embeddings = require_embeddings(embedding)
        self.engine = require_engine(engine) if engine is not None else only_engine()
        self.index = index if index is not None else PacketIndex.open(None)
        self._library = ChunkLibrary(self.engine, self.index, LangChainEmbedder(embedding))
        self._own_engine = False

    @classmethod
    def open(
        cls,
        folder: str | Path,
        embedding: Embeddings | None = None,
        *,
        model: str | None = None,
        reencode: bool = False,
        **engine_options: Any,
    ) -> Self:
        """Open the folder of an index, or start one there; nothing that is stored is encoded again.

        Args:
            folder: of rows, vectors and packets; ``kvpacket ingest --index`` makes such folders too.
            embedding: None for the model the index was built with, all-MiniLM-L6-v2 at first.
            model: None for the one the index was built with.
            reencode: make all packets anew if model, adapter or dtype changed, and those that are lost.
            engine_options: adapter, device, dtype, min_match_tokens and more, see KVPacketEngine.load; and remote,
                cache_bytes, namespace and kind, see KVPacketRAG.open. An index whose packets lie at a URL says so.

        Raises:
            PacketMismatchError: the packets were made by another model, adapter or dtype.
            PacketNotFoundError: none of them are in the folder or at its URL any more.
            StoreError: the folder is no index, or was built with other embeddings.
        """
        embedder = LangChainEmbedder(require_embeddings(embedding)) if embedding is not None else None
        folder = local_path(folder).expanduser().absolute()
        known_options("open", engine_options, LOADING)
        rag = KVPacketRAG.open(folder, model, embedder=embedder, reencode=reencode, **engine_options)
        store = cls(embedding or KVPacketEmbeddings(embedder=rag.embedder), rag.engine, rag.index)
        store._own_engine = True
        return store

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        engine: KVPacketEngine | None = None,
        folder: str | Path | None = None,
        **engine_options: Any,
    ) -> Self:
        """A store with these texts; see :meth:`add_texts`.

        Args:
            engine: one that is there already; the index is then in memory.
            folder: where to keep everything; None for memory.
            engine_options: to load an engine by; see :meth:`open`. A model made with the same ones has the same
                engine. Without engine, folder and options, it is the one that the models of this process are over.
        """
        if engine is not None and (folder is not None or engine_options):
            raise StoreError(
                "an engine was given together with a folder or options to load one; pass one of the two, for packets "
                "are kept in the engine's own store"
            )
        if folder is not None:
            store = cls.open(folder, embedding, **engine_options)
        else:
            known_options("from_texts", engine_options, OPTION_NAMES)
            store = cls(embedding, load_engine(EngineOptions(**engine_options)) if engine_options else engine)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @property
    def embeddings(self) -> Embeddings:
        """Of texts and questions."""
        return self._embeddings

    def __len__(self) -> int:
        return len(self.index)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts, or replace those whose ids are known; all or none.

        What is stored already costs nothing: an equal text is not encoded again, and one that keeps
        its id is not embedded again either.

        Args:
            texts: chunks, each shorter than the model's window.
            metadatas: one dict a text, of values JSON can hold.
            ids: one a text; None makes one up. Of an id given twice the last counts.

        Raises:
            DocumentError: a text is empty or too long.
            StoreError: numbers differ, metadata cannot be stored, or the files cannot be written.
        """
        refuse(kwargs)
        given = to_chunks(listed("texts", texts), metadatas, ids)
        chunks = list({chunk.chunk_id: chunk for chunk in given}.values())
        self._library.put(chunks)
        return [chunk.chunk_id for chunk in given]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete texts, and packets that no other text needs; None deletes all, unknown ids are no error."""
        refuse(kwargs)
        self._library.delete(None if ids is None else listed("ids", ids))
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents of these ids, in their order; unknown ones are left out."""
        return [to_document(chunk) for chunk in self.index.get(listed("ids", ids))]

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any) -> list[Document]:
        """The k documents nearest to a question, best first.

        Args:
            query: the question.
            k: how many; fewer come only if fewer match.
            filter: metadata to be equal, as a dict, or a function of a Document.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, filter, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The same with their cosine similarities, in [-1, 1]."""
        return self.similarity_search_with_score_by_vector(self._question(query), k, filter, **kwargs)

    def similarity_search_by_vector(
        self, embedding: Sequence[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The k documents nearest to a vector, best first."""
        found = self.similarity_search_with_score_by_vector(embedding, k, filter, **kwargs)
        return [document for document, _ in found]

    def similarity_search_with_score_by_vector(
        self, embedding: Sequence[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The same with their cosine similarities, in [-1, 1]."""
        refuse(kwargs)
        hits = self.index.search(embedding, require_count("k", k), to_condition(filter))
        return [(to_document(hit.chunk), hit.score) for hit in hits]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """k documents, of the fetch_k nearest to a question, that differ from each other."""
        return self.max_marginal_relevance_search_by_vector(
            self._question(query), k, fetch_k, lambda_mult, filter, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: Sequence[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """k documents, of the fetch_k nearest to a vector, that differ from each other.

        ``lambda_mult`` 1 counts nearness alone, 0 difference alone.
        """
        refuse(kwargs)
        wanted = max(require_count("k", k), require_count("fetch_k", fetch_k))
        hits = self.index.search(embedding, wanted, to_condition(filter))
        vectors = list(self.index.vectors([hit.chunk.chunk_id for hit in hits]))
        chosen = maximal_marginal_relevance(np.asarray(embedding, np.float32), vectors, lambda_mult, k)
        return [to_document(hits[place].chunk) for place in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: min(max((1.0 + cosine) / 2.0, 0.0), 1.0)

    def save(self, folder: str | Path) -> None:
        """Copy texts, vectors and packets into a folder, to be opened with :meth:`open`.

        Raises:
            StoreError: the folder holds an index with texts already, or cannot be written.
        """
        self._library.copy_to(folder)

    def close(self) -> None:
        """Close the index, and the engine if :meth:`open` loaded it."""
        self.index.close()
        if self._own_engine:
            self.engine.close()

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()  # over the same index and engine, which are one place

    def __reduce__(self) -> tuple[Any, ...]:
        raise KVPacketError(
            f"a {type(self).__name__} is an open index over a loaded model and cannot be pickled; open it in each "
            "process, by open(folder)"
        )

    def _question(self, text: str) -> list[float]:
        return self._embeddings.embed_query(require_text("the question", text))
