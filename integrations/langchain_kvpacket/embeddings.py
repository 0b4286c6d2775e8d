"""The project's embedder as LangChain embeddings, and LangChain embeddings as an embedder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from langchain_core.embeddings import Embeddings

from kvpacket_rag import Embedder, SentenceTransformerEmbedder


class KVPacketEmbeddings(Embeddings):
    """Embeddings of a sentence-transformers model, without a further package.

    Args:
        model: short name, folder or hub name.
        device: where it runs, as for PyTorch.
        embedder: one that is there already, in place of these two.

    Raises:
        ModelNotFoundError: there is no such model.
    """

    def __init__(
        self, model: str = "all-MiniLM-L6-v2", device: str = "cpu", *, embedder: Embedder | None = None
    ) -> None:
        self.embedder = embedder if embedder is not None else SentenceTransformerEmbedder(model, device)

    @property
    def model(self) -> str:
        """The name it was loaded by."""
        return self.embedder.name

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector of length 1 for each text."""
        vectors: list[list[float]] = self.embedder.embed_documents(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """A vector of length 1, near those of the texts that answer the question."""
        vector: list[float] = self.embedder.embed_query(text).tolist()
        return vector


class LangChainEmbedder:
    """LangChain embeddings as the project's own parts take them.

    The name is made of the class and the model it says it uses, so that an index can tell which
    embeddings it was built with.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._dim: int | None = None

    @property
    def name(self) -> str:
        """Of :class:`KVPacketEmbeddings`, the model's; of others, class and model."""
        if isinstance(self._embeddings, KVPacketEmbeddings):
            return self._embeddings.model
        model = getattr(self._embeddings, "model_name", None) or getattr(self._embeddings, "model", None)
        kind = type(self._embeddings).__name__
        return f"{kind}/{model}" if isinstance(model, str) else kind

    @property
    def dim(self) -> int:
        """Dimensions of the vectors; asking embeds a word, once."""
        if self._dim is None:
            self._dim = len(self._embeddings.embed_query("dimensions"))
        return self._dim

    def embed_documents(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """(n, dim) float32, one row for each text."""
        return np.asarray(self._embeddings.embed_documents(list(texts)), np.float32)

    def embed_query(self, text: str) -> npt.NDArray[np.float32]:
        """(dim,) float32."""
        return np.asarray(self._embeddings.embed_query(text), np.float32)
