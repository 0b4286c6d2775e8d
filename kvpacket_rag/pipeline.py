"""Documents in, answers out. Wiring only: every step is a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpacket_rag.answer import Answer, AnswerStream
from kvpacket_rag.chat import Message
from kvpacket_rag.chunk import Hit
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.documents import Document
from kvpacket_rag.embed import Embedder, SentenceTransformerEmbedder
from kvpacket_rag.engine import KVPacketEngine, Policy
from kvpacket_rag.errors import PacketMismatchError, PromptError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.ingest import Ingester, IngestProgress, IngestReport
from kvpacket_rag.packet import PacketSignature

SYSTEM_PROMPT = "Answer the question from the documents, in one short sentence."


@dataclass(frozen=True, slots=True)
class RetrievedAnswer:
    """An answer and what it was drawn from.

    Attributes:
        answer: the model's.
        hits: the chunks that stood in the prompt, best first.
    """

    answer: Answer
    hits: tuple[Hit, ...]


class KVPacketRAG:
    """An index of documents and the engine that answers from it.

    Args:
        engine: model and packet store.
        index: embeddings beside packet ids.
        embedder: the one the index was built with.
        chunk_tokens: most tokens of a chunk.
    """

    def __init__(self, engine: KVPacketEngine, index: PacketIndex, embedder: Embedder, chunk_tokens: int = 256) -> None:
        self.engine = engine
        self.index = index
        self.embedder = embedder
        self.chunk_tokens = chunk_tokens
        self._ingester = Ingester(engine, index, embedder, chunk_tokens)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | None = None,
        *,
        embedder: Embedder | None = None,
        chunk_tokens: int | None = None,
        reencode: bool = False,
        **engine_options: Any,
    ) -> KVPacketRAG:
        """Open the index in ``folder``, or start one there.

        Model, dtype, adapter, embedder and chunk size default to those the index was built with.

        Args:
            folder: holds rows, vectors and packets.
            model: short name, path or hub name.
            embedder: turns text into vectors; all-MiniLM-L6-v2 by default.
            chunk_tokens: most tokens of a chunk.
            reencode: when model, adapter or dtype changed, encode every chunk again.
            engine_options: passed to :meth:`KVPacketEngine.load`.

        Raises:
            PacketMismatchError: the packets were made by another model, adapter or dtype.
            StoreError: the folder is no index, or was built with another embedder.
        """
        index = PacketIndex.open(folder)
        options: dict[str, Any] = {
            "dtype": index.get_setting("dtype") or "auto",
            "adapter": index.get_setting("adapter") or None,
        }
        options |= engine_options
        model = model or index.get_setting("model") or "smollm2-135m-instruct"
        engine = KVPacketEngine.load(model, store=folder, **options)
        embedder = embedder or SentenceTransformerEmbedder(index.get_setting("embedder") or "all-MiniLM-L6-v2")
        rag = cls(engine, index, embedder, chunk_tokens or int(index.get_setting("chunk_tokens") or 256))
        rag._check(str(folder), reencode)
        rag._remember({"model": model, "adapter": str(options["adapter"] or "")})
        return rag

    def _check(self, folder: str, reencode: bool) -> None:
        """Never answer from packets or vectors another model made."""
        known = self.index.get_setting("embedder")
        if known and known != self.embedder.name:
            raise StoreError(
                f"the index in {folder} was built with embedder {known!r}, not {self.embedder.name!r}; "
                "open it with that one, or ingest into a new folder"
            )
        stored = self.index.get_setting("signature")
        if not stored or stored == self.engine.signature.to_json():
            return
        if reencode:
            self.reencode()
            return
        try:
            self.engine.signature.require(PacketSignature.from_json(stored), "any")
        except PacketMismatchError as error:
            raise PacketMismatchError(
                f"the index in {folder} holds packets of another model, adapter or dtype: {error}; "
                "or open it with reencode=True ('kvpacket ingest --reencode') to make its packets anew"
            ) from error

    def _remember(self, settings: Mapping[str, str]) -> None:
        common = {
            "signature": self.engine.signature.to_json(),
            "dtype": self.engine.signature.dtype,
            "embedder": self.embedder.name,
            "chunk_tokens": str(self.chunk_tokens),
        }
        for key, value in (common | dict(settings)).items():
            if self.index.get_setting(key) != value:
                self.index.set_setting(key, value)

    def add(
        self, documents: Iterable[Document], progress: Callable[[IngestProgress], None] | None = None
    ) -> IngestReport:
        """Add documents, or update those whose id is known; see :meth:`Ingester.add`."""
        return self._ingester.add(documents, progress)

    def delete(self, document_id: str) -> int:
        """Remove a document and the packets only it owned; see :meth:`Ingester.delete`."""
        return self._ingester.delete(document_id)

    def reencode(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Make every packet anew with the present model, adapter and dtype; returns how many chunks."""
        count = self._ingester.reencode(progress)
        self._remember({})
        return count

    def retrieve(self, question: str, k: int = 4) -> tuple[Hit, ...]:
        """The chunks nearest to a question, best first, each text once.

        Raises:
            PromptError: the question is empty.
            StoreError: the index is empty, or k is below 1.
        """
        if not question.strip():
            raise PromptError("the question is empty; ask something")
        if not len(self.index):
            raise StoreError("the index holds no chunks; ingest documents first")
        vector = self.embedder.embed_query(question)
        width = k
        while True:
            hits = self.index.search(vector, width)
            once = {hit.packet_id: hit for hit in reversed(hits)}
            found = [hit for hit in hits if once[hit.packet_id] is hit]
            if len(found) >= k or len(hits) < width:
                return tuple(found[:k])
            width *= 2

    def messages(self, question: str, hits: Sequence[Hit]) -> list[Message]:
        """The chat that puts the hits' text before the question."""
        documents = "\n\n".join(hit.chunk.text.strip() for hit in hits)
        return [
            Message("system", SYSTEM_PROMPT),
            Message("user", f"Documents:\n\n{documents}\n\nQuestion: {question.strip()}"),
        ]

    def ask(
        self, question: str, k: int = 4, settings: GenerationSettings | None = None, policy: Policy = "packets"
    ) -> RetrievedAnswer:
        """Retrieve and answer.

        Args:
            question: in natural language.
            k: chunks to retrieve; more than there are gives all.
            settings: of decoding; greedy by default.
            policy: ``"packets"``, or ``"prefill"`` to read the same prompt in full.
        """
        hits = self.retrieve(question, k)
        answer = self.engine.generate(self.messages(question, hits), settings, policy=policy)
        return RetrievedAnswer(answer, hits)

    def stream(
        self, question: str, k: int = 4, settings: GenerationSettings | None = None
    ) -> tuple[AnswerStream, tuple[Hit, ...]]:
        """Retrieve, and answer piece by piece."""
        hits = self.retrieve(question, k)
        return self.engine.stream(self.messages(question, hits), settings), hits

    def close(self) -> None:
        """Close index and store."""
        self.index.close()
        self.engine.close()
