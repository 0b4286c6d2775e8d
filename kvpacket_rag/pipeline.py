"""Documents in, answers out. Wiring only: every step is a module of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpacket_rag.answer import Answer, AnswerStream
from kvpacket_rag.backbone import is_unicode
from kvpacket_rag.chat import Message
from kvpacket_rag.chunk import Hit
from kvpacket_rag.datasets.templates import PIPELINE_STYLE
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.documents import Document
from kvpacket_rag.embed import Embedder, SentenceTransformerEmbedder
from kvpacket_rag.engine import KVPacketEngine, Policy
from kvpacket_rag.errors import PacketMismatchError, PromptError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.ingest import Ingester, PacketWorkers
from kvpacket_rag.journal import change_lock
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.nearest import Kind
from kvpacket_rag.opening import join
from kvpacket_rag.origin import Origin
from kvpacket_rag.progress import IngestReport, OnProgress
from kvpacket_rag.reading import Reuse
from kvpacket_rag.store.opening import KEEP_HERE


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

    Several indexes may share an engine, see :mod:`kvpacket_rag.owners`.

    Args:
        engine: model and packet store.
        index: embeddings beside packet ids.
        embedder: the one the index was built with.
        chunk_tokens: most tokens of a chunk.
        lock: held while the index is changed; :meth:`open` uses a file lock, so that processes take turns.

    Attributes:
        reencoded: what :meth:`open` encoded again; None if it had no need to.

    Raises:
        PacketMismatchError: the packets were made by another model, adapter or dtype.
        PacketNotFoundError: the engine's store knows none of the index's packets.
        StoreError: the index was built with another embedder.

    Example:
        >>> with KVPacketRAG.open("library") as rag:               # doctest: +SKIP
        ...     rag.add([Document("lease", "Ada Marlow signed the lease …")])
        ...     print(rag.ask("Who signed the lease?").answer.text)
    """

    def __init__(
        self,
        engine: KVPacketEngine,
        index: PacketIndex,
        embedder: Embedder,
        chunk_tokens: int = 256,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.engine = engine
        self.index = index
        self.embedder = embedder
        self.chunk_tokens = chunk_tokens
        self.reencoded: IngestReport | None = None
        self._ingester = Ingester(engine, index, embedder, chunk_tokens, lock)
        join(engine, index, embedder, chunk_tokens, lock)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: str | None = None,
        *,
        embedder: Embedder | str | None = None,
        chunk_tokens: int | None = None,
        kind: Kind = "flat",
        reencode: bool = False,
        namespace: str = "",
        remote: str | None = None,
        cache_bytes: int | None = None,
        progress: OnProgress | None = None,
        **engine_options: Any,
    ) -> Self:
        """Open the index in ``folder``, or start one there.

        Model, dtype, adapter, embedder and chunk size default to those the index was built with.

        Args:
            folder: holds rows, vectors and packets, and a copy of the adapter.
            model: short name, path or hub name.
            embedder: turns text into vectors, an object or the name of a sentence-transformers model;
                all-MiniLM-L6-v2 by default. Has to be given for an index whose vectors another framework made.
            chunk_tokens: most tokens of a chunk, 256 by default; what is stored keeps its size until it
                is added again.
            kind: of search: ``"flat"`` is exact, ``"hnsw"`` approximate on large indexes.
            reencode: when model, adapter or dtype changed, encode every chunk again; when packets are lost, those.
            namespace: whose index it is; each has one of its own below ``folder``, see
                :func:`~kvpacket_rag.namespace.namespace_folder`.
            remote: URL of an object store for the packets, such as ``s3://bucket/packets``, of which the folder keeps
                those that were used last; see :class:`~kvpacket_rag.store.RemoteStore`. What the index was built with
                by default; packets that an index has in its folder alone are uploaded. ``"none"`` keeps these in the
                folder, and has the index forget a URL to which they were never uploaded.
            cache_bytes: cap on the packets that lie in the folder.
            progress: of encoding again.
            engine_options: passed to :meth:`KVPacketEngine.load`; ``adapter="auto"`` is the index's own adapter,
                unless ``reencode`` is given or the index is new.

        Raises:
            PacketMismatchError: the packets were made by another model, adapter or dtype.
            PacketNotFoundError: none of the packets are in the folder or at its URL any more.
            StoreError: the folder is no index, or was built with another embedder.
        """
        folder = namespace_folder(folder, namespace).expanduser().absolute()
        if namespace and remote and remote != KEEP_HERE:
            remote = f"{remote.rstrip('/')}/{namespace_folder('', namespace).as_posix()}"
        engine_options |= {"remote": remote, "cache_bytes": cache_bytes}
        with ExitStack() as undo:
            index = PacketIndex.open(folder, kind=kind)
            undo.callback(index.close)
            origin = Origin(index, folder)
            if embedder is None:
                origin.require_embedder()
            engine = origin.load_engine(model, engine_options, keep_adapter=not reencode)
            undo.callback(engine.close)
            if embedder is None or isinstance(embedder, str):
                embedder = SentenceTransformerEmbedder(embedder or origin.embedder)
            if chunk_tokens is None:
                chunk_tokens = origin.chunk_tokens
            lock, reencoded = change_lock(folder), None
            if origin.check(engine, embedder.name, reencode):
                origin.check_vectors(embedder)
                ingester = Ingester(engine, index, embedder, chunk_tokens, lock)
                ingester.require_fit()
                origin.begin_reencoding(engine)
                reencoded = ingester.reencode(progress)
                origin.write(engine, embedder.name, chunk_tokens)
            rag = cls(engine, index, embedder, chunk_tokens, lock)
            rag.reencoded = reencoded
            undo.pop_all()
        return rag

    def add(
        self, documents: Iterable[Document], progress: OnProgress | None = None, workers: PacketWorkers | None = None
    ) -> IngestReport:
        """Add documents, or update those whose id is known; see :meth:`Ingester.add`."""
        self._check_signature()
        return self._ingester.add(documents, progress, workers)

    def delete(self, document_id: str) -> int:
        """Remove a document and the packets only it owned; see :func:`remove_document`."""
        return self._ingester.delete(document_id)

    def _check_signature(self) -> None:
        """Stop when another process encoded the index again for another model meanwhile."""
        written = self.index.get_setting("signature")
        if written not in (None, self.engine.signature.to_json()):
            raise PacketMismatchError("the index was encoded again with another model, adapter or dtype; open it anew")

    def retrieve(self, question: str, k: int = 4) -> tuple[Hit, ...]:
        """The chunks nearest to a question, best first, each text once.

        Raises:
            PromptError: the question is empty.
            StoreError: the index is empty, or k is below 1.
        """
        if not isinstance(question, str):
            raise PromptError(f"the question is a {type(question).__name__}; pass a string")
        if not question.strip():
            raise PromptError("the question is empty; ask something")
        if not is_unicode(question):
            raise PromptError("the question holds a lone surrogate, which no encoding knows; remove it")
        self._check_signature()
        if not len(self.index):
            raise StoreError("the index holds no chunks; add documents first ('kvpacket ingest')")
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
        """The chat that puts the hits' text before the question, the best nearest to it."""
        return PIPELINE_STYLE.messages([hit.chunk.text.strip() for hit in reversed(hits)], question.strip())

    def ask(
        self, question: str, k: int = 4, settings: GenerationSettings | None = None, policy: Policy = "packets"
    ) -> RetrievedAnswer:
        """Retrieve and answer.

        Args:
            question: in natural language.
            k: chunks to retrieve; more than there are gives all.
            settings: of decoding; greedy by default.
            policy: ``"packets"``, or ``"prefill"`` to read the same prompt in full.

        Raises:
            PromptError: the question is empty.
            ContextTooLongError: chunks, question and answer exceed the model's window.
            StoreError: the index is empty, or k is below 1.
        """
        stream, hits = self.stream(question, k, settings, policy)
        return RetrievedAnswer(stream.read_all(), hits)

    def stream(
        self, question: str, k: int = 4, settings: GenerationSettings | None = None, policy: Policy = "packets"
    ) -> tuple[AnswerStream, tuple[Hit, ...]]:
        """Retrieve, and answer piece by piece; see :meth:`ask`."""
        hits = self.retrieve(question, k)
        reuse = Reuse(hints=tuple(hit.packet_id for hit in hits))  # so that one whose packet is lost is a miss
        return self.engine.stream(self.messages(question, hits), settings, policy=policy, reuse=reuse), hits

    def close(self) -> None:
        """Close index and store."""
        self.index.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
