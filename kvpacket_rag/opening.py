"""An index and an engine put together: one way for the pipeline and for the frameworks."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress

from kvpacket_rag.embed import Embedder
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.origin import Origin
from kvpacket_rag.owners import claim
from kvpacket_rag.ownership import Ownership


def join(
    engine: KVPacketEngine,
    index: PacketIndex,
    embedder: Embedder,
    chunk_tokens: int | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> None:
    """See that an engine can answer from an index, and make the index its own.

    What the index is built with is noted in it, its rows own their packets under names that no other index over the
    store has, and what killed processes left half done is put in order.

    Args:
        engine: with the packets in its store.
        index: of rows and vectors.
        embedder: the one the index was built with.
        chunk_tokens: most tokens of a chunk; None if others cut the chunks.
        lock: held while deletions are finished.

    Raises:
        PacketMismatchError: the packets were made by another model, adapter or dtype.
        PacketNotFoundError: the engine's store knows none of them.
        StoreError: the index was built with another embedder.
    """
    origin = Origin(index, index.folder)
    origin.check(engine, embedder.name)
    origin.check_vectors(embedder)
    origin.write(engine, embedder.name, chunk_tokens)
    claim(index, engine.store)
    with suppress(StoreError):  # where it cannot be written now, the next change does it
        OwnerJournal(index, engine.store).finish_deletions(lock)
    Ownership(index, engine.store, lambda chunk: engine.encoder.identify(chunk.text)[0], index.folder).recover()
