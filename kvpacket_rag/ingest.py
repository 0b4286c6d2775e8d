"""Documents to chunks, packets and rows; resumable, and never encoding twice what is stored."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.documents import Document
from kvpacket_rag.embed import Embedder, Vectors
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import DocumentError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal, remove_document
from kvpacket_rag.owners import add_owners, claim_names, owner_names
from kvpacket_rag.ownership import Ownership
from kvpacket_rag.packet_writer import MissingPacket
from kvpacket_rag.progress import IngestProgress, IngestReport, OnProgress
from kvpacket_rag.rows import metadata_json

MARK = "ingest_mark"  # metadata key of a chunk: what its document was when the chunk was cut from it
_BATCH_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class _Plan:
    """The chunks a document is to have; ``missing`` holds the packets that are not there yet, each with its tokens."""

    document_id: str
    chunks: list[Chunk]
    missing: dict[str, int]
    is_new: bool


class PacketWorkers(Protocol):
    """Processes that make packets, such as :class:`~kvpacket_rag.ingest_ray.RayWorkers`."""

    def make(self, engine: KVPacketEngine, batches: Sequence[Sequence[MissingPacket]]) -> Iterator[str]:
        """Have each batch made in one forward and its packets put into the engine's store; their ids, as they come."""
        ...


class Ingester:
    """Keeps an index and a packet store in step with documents.

    Packets come first and rows second, so whatever interrupts it, no row is without its packet; what
    an interrupted run left behind is taken up by the next.

    Args:
        engine: model and packet store.
        index: of embeddings and packet ids.
        embedder: of chunk texts.
        chunk_tokens: most tokens of a chunk.
        lock: keeps other processes from changing the same index meanwhile; threads are kept apart here.

    Raises:
        DocumentError: ``chunk_tokens`` is below 1.
    """

    def __init__(
        self,
        engine: KVPacketEngine,
        index: PacketIndex,
        embedder: Embedder,
        chunk_tokens: int,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        if chunk_tokens < 1:
            raise DocumentError(f"chunk_tokens is {chunk_tokens}; expected 1 or more")
        self.engine = engine
        self.index = index
        self.embedder = embedder
        self.chunk_tokens = chunk_tokens
        self._journal = OwnerJournal(index, engine.store)
        self._threads = threading.RLock()
        self._processes = lock or nullcontext()

    def add(
        self, documents: Iterable[Document], progress: OnProgress | None = None, workers: PacketWorkers | None = None
    ) -> IngestReport:
        """Add documents, or update those whose id is known; what is stored is not encoded again.

        A document that did not change costs nothing; one whose metadata alone changed is neither encoded
        nor embedded again. All documents are read before the first is encoded, so that progress has an end
        to count to. May be interrupted and run again at any moment.

        Args:
            documents: to be split, encoded and embedded; of one id twice, the last counts. One that cannot be
                cut into chunks is skipped; one without text removes what was stored under its id.
            progress: called as packets are finished.
            workers: make the packets in place of this process, which then only embeds; the packets are the same.

        Raises:
            StoreError: metadata cannot be stored, or the files cannot be written.
            StoreFullError: no room is left; the packets made before stay, and a later run begins with them.
        """
        with self._threads, self._processes:
            self._journal.finish_deletions()
            report = IngestReport()
            plans = self._plans(documents, report)
            meter = _Meter(progress, {name: size for plan in plans for name, size in plan.missing.items()}, report)
            if workers is not None:
                self._make_ahead(plans, workers, meter)
            for batch in _batches(plans):
                self._store(batch, meter)
                report.added += sum(plan.is_new for plan in batch)
                report.updated += sum(not plan.is_new for plan in batch)
                report.chunks += sum(len(plan.chunks) for plan in batch)
            return report

    def delete(self, document_id: str) -> int:
        """Remove a document, its rows, and the packets no other chunk refers to; see :func:`remove_document`."""
        with self._threads, self._processes:
            return remove_document(self.index, self.engine.store, document_id)

    def require_fit(self) -> None:
        """See that every chunk could be encoded with the present model.

        Raises:
            DocumentError: one is longer than its window.
        """
        for chunk, _ in self.index.rows():
            self.engine.encoder.identify(chunk.text)

    def reencode(self, progress: OnProgress | None = None) -> IngestReport:
        """Make every packet anew with the present model, adapter and dtype, and let go of the old ones as it goes.

        Chunks keep their texts. May be interrupted and run again; what is done is not done twice.

        Returns:
            How many chunks there are, and how many packets had to be made.

        Raises:
            DocumentError: a chunk is longer than the model's window; see :meth:`require_fit`.
            StoreFullError: no room is left; what was done before stays done.
        """
        with self._threads, self._processes:
            rows, store, identify = list(self.index.rows()), self.engine.store, self.engine.encoder.identify
            missing = {name: len(ids) for name, ids in (identify(c.text) for c, _ in rows) if name not in store}
            report = IngestReport(chunks=len(rows))
            meter = _Meter(progress, missing, report)
            claim_names(self.index, store)  # what others own under the names it had stays theirs
            ownership = Ownership(self.index, store, lambda chunk: identify(chunk.text)[0], None)
            for start in range(0, len(rows), _BATCH_CHUNKS):
                batch = rows[start : start + _BATCH_CHUNKS]
                ids = [chunk.chunk_id for chunk, _ in batch]
                add_owners(store, [old for _, old in batch], ownership.owners(ids))  # a packet goes with its last
                with ownership.changing(ids) as owners:
                    names = self.engine.encode([chunk.text for chunk, _ in batch], owners, meter.tell)
                    self.index.set_packet_ids(dict(zip(ids, names, strict=True)))
                meter.finish(names)
            return report

    def _plans(self, documents: Iterable[Document], report: IngestReport) -> list[_Plan]:
        from kvpacket_rag.split import Splitter  # late: a compiled extension that only ingesting needs

        splitter = Splitter(self.engine.count_tokens)
        known = {chunk.packet_id for chunk in self.engine.store.known(self.engine.signature)}
        lost = {chunk.document_id for chunk, name in self.index.rows() if name not in known}
        plans: dict[str, _Plan] = {}
        unchanged: set[str] = set()
        for number, document in enumerate(documents):
            if not isinstance(document, Document):
                raise DocumentError(f"item {number} is a {type(document).__name__}; pass Document(document_id, text)")
            name = document.document_id
            plans.pop(name, None)
            unchanged.discard(name)
            report.skipped.pop(name, None)
            stored = self.index.get(self.index.chunk_ids(name))
            mark = self._mark(document)
            if stored and name not in lost and all(chunk.metadata.get(MARK) == mark for chunk in stored):
                unchanged.add(name)
                continue
            try:
                chunks = [_named(chunk, mark) for chunk in splitter.split(document, self.chunk_tokens)]
                wanted = [self.engine.encoder.identify(chunk.text) for chunk in chunks]
            except DocumentError as error:
                report.skipped[name] = str(error)
                continue
            if chunks or stored:
                missing = {packet: len(ids) for packet, ids in wanted if packet not in known}
                plans[name] = _Plan(name, chunks, missing, not stored)
            else:
                report.skipped[name] = "holds no text but white space"
        self._journal.settle(unchanged)
        report.unchanged = len(unchanged)
        return list(plans.values())

    def _make_ahead(self, plans: Sequence[_Plan], workers: PacketWorkers, meter: _Meter) -> None:
        """Have all packets made that are missing, in the forwards in which :meth:`_store` would make them."""
        self._note(plans)
        forwards: list[list[MissingPacket]] = []
        made: dict[str, int] = {}
        for batch in _batches(plans):
            chunks = [chunk for plan in batch for chunk in plan.chunks]
            owners = owner_names(self.index, self.engine.store, [chunk.chunk_id for chunk in chunks])
            new = self.engine.writer.missing_batches([chunk.text for chunk in chunks], owners, made)
            made |= {packet.packet_id: len(packet.ids) for forward in new for packet in forward}
            forwards += new
        done = 0
        for name in workers.make(self.engine, forwards):
            done += made[name]
            meter.tell(done, 0)
        meter.finish(made)

    def _note(self, plans: Sequence[_Plan]) -> dict[str, list[str]]:
        """Write down which chunks are about to come and go; returns those the documents have now."""
        old = {plan.document_id: self.index.chunk_ids(plan.document_id) for plan in plans}
        self._journal.note({p.document_id: [*old[p.document_id], *(c.chunk_id for c in p.chunks)] for p in plans})
        return old

    def _mark(self, document: Document) -> str:
        """All that a document's chunks depend on: its text, its metadata and the chunk size."""
        ordered = dict(sorted(document.metadata.items(), key=lambda item: str(item[0])))
        metadata = metadata_json(document.document_id, ordered)  # tells the splitter the kind, too
        return hashlib.sha256(f"{document.content_hash}/{self.chunk_tokens}/{metadata}".encode()).hexdigest()

    def _store(self, batch: Sequence[_Plan], meter: _Meter) -> None:
        """Packets, then rows in place of those the documents had before."""
        old, chunks = self._note(batch), [chunk for plan in batch for chunk in plan.chunks]
        new = [chunk.chunk_id for chunk in chunks]
        owners = owner_names(self.index, self.engine.store, new)
        names = self.engine.encode([chunk.text for chunk in chunks], owners, meter.tell)
        self.index.add(chunks, self._vectors(chunks), names, {name for ids in old.values() for name in ids} - set(new))
        self._journal.settle(old)
        meter.finish(names)

    def _vectors(self, chunks: Sequence[Chunk]) -> Vectors:
        """(n, dim); chunks that have a row keep its vector, for their id changes with their text."""
        kept = [chunk.chunk_id for chunk in self.index.get([chunk.chunk_id for chunk in chunks])]
        vectors = dict(zip(kept, self.index.vectors(kept), strict=True))
        new = [chunk for chunk in chunks if chunk.chunk_id not in vectors]
        if new:
            embedded = self.embedder.embed_documents([chunk.text for chunk in new])
            vectors |= dict(zip((chunk.chunk_id for chunk in new), embedded, strict=True))
        return np.array([vectors[chunk.chunk_id] for chunk in chunks], np.float32)


class _Meter:
    """Counts the tokens of a whole run from what the engine says of one batch.

    Args:
        progress: is told.
        missing: the packets to be made, each with its tokens.
        report: is kept up to date.
    """

    def __init__(self, progress: OnProgress | None, missing: Mapping[str, int], report: IngestReport) -> None:
        self._progress = progress
        self._missing = dict(missing)
        self._total = sum(missing.values())
        self._report = report
        self._started = time.perf_counter()
        self._done = 0  # tokens of finished batches
        self._before = 0  # tokens encoded in finished batches

    def tell(self, encoded: int, _: int) -> None:
        """One more packet of the batch is stored; ``encoded`` tokens of it are now."""
        self._report.packets_encoded += 1
        self._report.tokens_encoded = self._before + encoded
        self._show(self._done + encoded)

    def finish(self, packets: Iterable[str]) -> None:
        """The batch is done: these packets are there."""
        self._done += sum(self._missing.pop(name, 0) for name in packets)
        self._before = self._report.tokens_encoded
        self._show(self._done)

    def _show(self, done: int) -> None:
        self._report.seconds = time.perf_counter() - self._started
        if self._progress is not None:
            self._progress(IngestProgress(done, self._total, self._report.tokens_encoded, self._report.seconds))


def _named(chunk: Chunk, mark: str) -> Chunk:
    """A chunk whose id changes with its text, so that the old packet loses its owner when the text does."""
    digest = hashlib.sha256(chunk.text.encode()).hexdigest()[:12]
    return replace(chunk, chunk_id=f"{chunk.chunk_id}:{digest}", metadata={**chunk.metadata, MARK: mark})


def _batches(plans: Sequence[_Plan]) -> Iterator[list[_Plan]]:
    """Whole documents, about as many chunks a batch as are worth one commit."""
    batch: list[_Plan] = []
    num_chunks = 0
    for plan in plans:
        batch.append(plan)
        num_chunks += len(plan.chunks)
        if num_chunks >= _BATCH_CHUNKS:
            yield batch
            batch, num_chunks = [], 0
    if batch:
        yield batch
