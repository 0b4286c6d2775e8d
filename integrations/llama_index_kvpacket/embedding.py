"""KVPacketEmbedding: LlamaIndex's embedding interface on an embedder of this package."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr

from kvpacket_rag import Embedder, KVPacketError, SentenceTransformerEmbedder
from llama_index_kvpacket.parameters import require_known

_ALIKE = 1e-3  # of a vector of length 1; a text alone and in a batch differ by less, two models by far more
_in_use: WeakValueDictionary[int, KVPacketEmbedding] = WeakValueDictionary()


class KVPacketEmbedding(BaseEmbedding):
    """Embeds by a sentence-transformers model, offline where its weights are installed as a package.

    Args:
        model_name: as for ``SentenceTransformerEmbedder``.
        embedder: any embedder, in place of one loaded by name.
        fields: any field of this class or of ``BaseEmbedding``.

    Raises:
        KVPacketError: an unknown argument.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model_name: str = Field(default="all-MiniLM-L6-v2", description="Short name, folder or hub name of the model.")
    device: str = Field(default="cpu", description="Where the model runs.")

    _embedder: Embedder = PrivateAttr()
    _can_reload: bool = PrivateAttr(default=True)

    def __init__(self, model_name: str | None = None, *, embedder: Embedder | None = None, **fields: Any) -> None:
        require_known(type(self).__name__, fields, {*type(self).model_fields, "embedder"})
        name = embedder.name if embedder is not None else model_name
        super().__init__(**({**fields, "model_name": name} if name else fields))
        self._can_reload = embedder is None
        self._embedder = embedder or SentenceTransformerEmbedder(self.model_name, self.device, self.embed_batch_size)
        if self._can_reload:
            _in_use[id(self)] = self

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._embedder.embed_query(query).tolist()
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._embedder.embed_documents(list(texts)).tolist()
        return vectors

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: Sequence[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVPacketEmbedding:
        memo = {} if memo is None else memo
        memo[id(self._embedder)] = self._embedder
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._can_reload:
            raise KVPacketError(
                f"a {type(self).__name__} made from an embedder object cannot be pickled, for another process could "
                "not load it again; make it from model_name"
            )
        kept = type(self).model_fields.keys() - {"callback_manager", "rate_limiter"}
        return _rebuild, (type(self), {name: getattr(self, name) for name in kept})


def embedder_of(text: str, vector: Sequence[float]) -> str | None:
    """Name of the model of a KVPacketEmbedding of this process that embeds the text so; None if there is none."""
    for model in list(_in_use.values()):
        own = model._get_text_embedding(text)
        if len(own) == len(vector) and np.allclose(own, vector, rtol=0, atol=_ALIKE):
            return model.model_name
    return None


def _rebuild(kind: type[KVPacketEmbedding], fields: dict[str, Any]) -> KVPacketEmbedding:
    return kind(**fields)
