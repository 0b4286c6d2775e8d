"""Text to the vectors it is found by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpacket_rag.errors import MissingExtraError, ModelNotFoundError

Vectors = npt.NDArray[np.float32]
_MANY_TOKENS = 100_000  # tokenizers without a limit report numbers like 1e30


class Embedder(Protocol):
    """What an index needs of an embedding model. Equal names must mean equal vectors."""

    @property
    def name(self) -> str:
        """Kept with an index, so that questions are embedded as its chunks were."""
        ...

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        ...

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """(n, dim) float32, one row for each text."""
        ...

    def embed_query(self, text: str) -> Vectors:
        """(dim,) float32: near the texts that answer the question."""
        ...


class SentenceTransformerEmbedder:
    """A sentence-transformers model, with its own prompts for questions and documents.

    A text longer than the model's window is cut at white space into parts that fit; its vector is
    the mean of theirs, weighted by tokens. So the end of a long chunk is found as its beginning is,
    where the model alone would read the beginning only. Threads may share an embedder.
    """

    def __init__(self, name: str = "all-MiniLM-L6-v2", device: str = "cpu", batch_size: int = 32) -> None:
        """Load the model.

        Args:
            name: short name, folder or hub name; see :func:`kvpacket_rag.models.resolve_embedder`.
            device: where it runs, as for PyTorch.
            batch_size: texts embedded at a time.

        Raises:
            MissingExtraError: sentence-transformers is not installed.
            ModelNotFoundError: there is no such model, or it is no embedding model.
        """
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError(
                "embedding texts needs the package sentence-transformers, which is not installed; run "
                "`pip install sentence-transformers`, or pass an Embedder of your own"
            ) from error
        from kvpacket_rag.models import hub_has, quietly_loading, resolve_embedder

        source = resolve_embedder(name)
        local = isinstance(source, Path) or not hub_has(source)
        try:
            with quietly_loading():
                self._model: Any = SentenceTransformer(str(source), device=device, local_files_only=local)
        except (OSError, ValueError, KeyError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelNotFoundError(
                f"no embedding model can be loaded from {str(source)!r}: {reason}; pass the folder of a "
                "sentence-transformers model or its name on the hub"
            ) from error
        self._name = name.removeprefix("sentence-transformers/")
        self._batch_size = batch_size
        self._lock = threading.Lock()  # the tokenizer keeps settings of its own between calls
        self._window = self._text_window()
        self._dim = len(self._model.encode("", show_progress_bar=False))

    @property
    def name(self) -> str:
        """The name it was loaded by."""
        return self._name

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return self._dim

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """(n, dim) float32 of length 1, one row for each text."""
        return self._embed(texts, self._model.encode_document)

    def embed_query(self, text: str) -> Vectors:
        """(dim,) float32 of length 1."""
        query: Vectors = self._embed([text], self._model.encode_query)[0]
        return query

    def _embed(self, texts: Sequence[str], encode: Callable[..., Any]) -> Vectors:
        if not texts:
            return np.empty((0, self._dim), np.float32)
        with self._lock:
            parts = [(place, *part) for place, text in enumerate(texts) for part in self._parts(text)]
            places, tokens = np.array([part[0] for part in parts]), np.array([part[2] for part in parts])
            vectors = encode(
                [part[1] for part in parts],
                batch_size=self._batch_size,
                show_progress_bar=False,
                convert_to_numpy=True,
                normalize_embeddings=True,
            )
        sums = np.zeros((len(texts), self._dim))
        np.add.at(sums, places, vectors * tokens[:, None])
        units: Vectors = (sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        return units

    def _parts(self, text: str) -> Iterator[tuple[str, int]]:
        """The text in parts that fit the model's window, each with its number of tokens."""
        tokens = self._count(text)
        if tokens <= self._window or len(text) < 2:
            yield text, max(tokens, 1)
            return
        for part in _cut(text, -(-tokens // self._window)):
            yield from self._parts(part)

    def _count(self, text: str) -> int:
        """Tokens of a text, without those that the model puts around it."""
        tokens = self._model.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        count: int = len(tokens["input_ids"])
        return count

    def _text_window(self) -> int:
        """Tokens of text that the model reads beside its longest prompt and special tokens."""
        window = min(int(self._model.max_seq_length or _MANY_TOKENS), _MANY_TOKENS)
        prompts = [self._count(prompt) for prompt in self._model.prompts.values()]
        special: int = self._model.tokenizer.num_special_tokens_to_add()
        return max(window - special - max(prompts, default=0), 1)


def _cut(text: str, count: int) -> list[str]:
    """About ``count`` parts of like length, none empty, cut at white space where there is some nearby."""
    parts, start = [], 0
    for i in range(1, min(count, len(text))):
        end = i * len(text) // min(count, len(text))
        space = max(text.rfind(mark, start + 1, end) for mark in (" ", "\n"))
        end = space if end - space < 100 and space > start else end  # characters; longer words are no words
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]
