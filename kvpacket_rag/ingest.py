"""Documents to chunks, packets and rows; resumable, and never encoding twice what is stored."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.documents import Document
from kvpacket_rag.embed import Embedder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex

_BATCH_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far an ingest is.

    Attributes:
        tokens_done: of chunk text that has its packet.
        tokens_total: of all chunks of new and changed documents.
        seconds: since encoding began.
    """

    tokens_done: int
    tokens_total: int
    seconds: float


@dataclass(slots=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        added, updated, unchanged: documents.
        chunks: of the added and updated documents.
        packets_encoded: chunks that had no packet yet.
        tokens_encoded: tokens of those.
    """

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    chunks: int = 0
    packets_encoded: int = 0
    tokens_encoded: int = 0


class Ingester:
    """Keeps an index and a packet store in step with documents.

    Packets come first and rows second, so whatever interrupts it, no row is without its packet; what
    an interrupted run left behind is taken up by the next.

    Args:
        engine: model and packet store.
        index: of embeddings and packet ids.
        embedder: of chunk texts.
        chunk_tokens: most tokens of a chunk.
    """

    def __init__(self, engine: KVPacketEngine, index: PacketIndex, embedder: Embedder, chunk_tokens: int) -> None:
        self.engine = engine
        self.index = index
        self.embedder = embedder
        self.chunk_tokens = chunk_tokens

    def add(
        self, documents: Iterable[Document], progress: Callable[[IngestProgress], None] | None = None
    ) -> IngestReport:
        """Add documents, or update those whose id is known; what is stored is not encoded again.

        A document whose text and chunk size did not change costs nothing; one whose metadata alone
        changed gets new metadata. May be interrupted and run again at any moment.

        Args:
            documents: to be split, encoded and embedded.
            progress: called as packets are finished.

        Raises:
            DocumentError: a chunk cannot be made; what was added before stays.
            StoreFullError: no room is left; what was added before stays.
        """
        from kvpacket_rag.split import Splitter  # late: a compiled extension that only ingesting needs

        report = IngestReport()
        splitter = Splitter(self.engine.count_tokens)
        work: list[tuple[Document, list[Chunk]]] = []
        for document in documents:
            stored = self.index.get(self.index.chunk_ids(document.document_id))
            if stored and self._is_current(document, stored):
                report.unchanged += 1
                self._update_metadata(document, stored)
                continue
            report.added, report.updated = report.added + (not stored), report.updated + bool(stored)
            work.append((document, [self._named(c, document) for c in splitter.split(document, self.chunk_tokens)]))
        self._ingest(work, report, progress)
        return report

    def _is_current(self, document: Document, stored: Sequence[Chunk]) -> bool:
        mark = self._mark(document)
        return all(chunk.metadata.get("content") == mark for chunk in stored)

    def _mark(self, document: Document) -> str:
        """What a chunk's text depends on: the document's text and the chunk size."""
        return f"{document.content_hash}/{self.chunk_tokens}"

    def _named(self, chunk: Chunk, document: Document) -> Chunk:
        """A chunk whose id changes with its text, so that the old packet loses its owner when the text does."""
        digest = hashlib.sha256(chunk.text.encode()).hexdigest()[:12]
        metadata = {**chunk.metadata, "content": self._mark(document)}
        return replace(chunk, chunk_id=f"{chunk.chunk_id}:{digest}", metadata=metadata)

    def _update_metadata(self, document: Document, stored: Sequence[Chunk]) -> None:
        for chunk in stored:
            metadata = {**chunk.metadata, **document.metadata}
            if metadata != chunk.metadata:
                self.index.set_metadata(chunk.chunk_id, metadata)

    def _ingest(
        self,
        work: Sequence[tuple[Document, list[Chunk]]],
        report: IngestReport,
        progress: Callable[[IngestProgress], None] | None,
    ) -> None:
        counts = {chunk.chunk_id: self.engine.count_tokens(chunk.text) for _, chunks in work for chunk in chunks}
        done, total, started = 0, sum(counts.values()), time.perf_counter()
        for batch in _batches(work):
            chunks = [chunk for _, new in batch for chunk in new]
            if not chunks:
                continue

            def tell(encoded: int, _: int, before: int = done) -> None:
                if progress is not None:
                    progress(IngestProgress(before + encoded, total, time.perf_counter() - started))

            known = len(self.engine.store)
            names = self.engine.encode([c.text for c in chunks], [c.chunk_id for c in chunks], tell)
            report.packets_encoded += len(self.engine.store) - known
            vectors = self.embedder.embed_documents([chunk.text for chunk in chunks])
            self.index.add(chunks, vectors, names)
            for document, new in batch:
                self._drop({*self.index.chunk_ids(document.document_id)} - {chunk.chunk_id for chunk in new})
            report.chunks += len(chunks)
            done += sum(counts[chunk.chunk_id] for chunk in chunks)
            tell(0, 0, done)

    def _drop(self, chunk_ids: Iterable[str]) -> None:
        """Rows first: a packet without a row is only waste, a row without a packet would be a miss."""
        gone = self.index.delete(chunk_ids)
        self.engine.drop_owners(gone)

    def delete(self, document_id: str) -> int:
        """Remove a document, its rows, and the packets no other chunk refers to.

        Returns:
            How many chunks went.

        Raises:
            StoreError: no such document.
        """
        chunk_ids = self.index.chunk_ids(document_id)
        if not chunk_ids:
            raise StoreError(f"the index holds no document {document_id!r}; 'kvpacket inspect' lists them")
        self._drop(chunk_ids)
        return len(chunk_ids)

    def reencode(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Make every packet anew with the present model, adapter and dtype; returns how many chunks."""
        rows = list(self.index.rows())
        for start in range(0, len(rows), _BATCH_CHUNKS):
            batch = rows[start : start + _BATCH_CHUNKS]
            chunks = [chunk for chunk, _ in batch]
            names = self.engine.encode([c.text for c in chunks], [c.chunk_id for c in chunks], progress)
            self.index.set_packet_ids({c.chunk_id: name for c, name in zip(chunks, names, strict=True)})
        kept = {name for _, name in self.index.rows()}
        for name in {old for _, old in rows} - kept:
            self.engine.store.delete(name)
        return len(rows)


def _batches(work: Sequence[tuple[Document, list[Chunk]]]) -> Iterator[list[tuple[Document, list[Chunk]]]]:
    """Whole documents, about as many chunks a batch as are worth one commit."""
    batch: list[tuple[Document, list[Chunk]]] = []
    for entry in work:
        batch.append(entry)
        if sum(len(chunks) for _, chunks in batch) >= _BATCH_CHUNKS:
            yield batch
            batch = []
    if batch:
        yield batch
