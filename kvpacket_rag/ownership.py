"""Whose packets are whose: a row of an index owns the packet of its text, and no other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from filelock import Timeout

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import change_lock
from kvpacket_rag.owners import add_owners, adopt, owner_names
from kvpacket_rag.store import PacketStore

CHANGING = "\n(changing)"  # ends the names under which packets are kept while their rows change
_NOTED = "unsettled_nodes"
# Of threads that change one index, over however many objects.
_turns: WeakKeyDictionary[PacketIndex, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


class Ownership:
    """Keeps owners in a packet store in step with the rows of an index.

    Rows and packets lie in two databases, and no transaction spans both. So what is about to change is noted in
    the index first, and what a killed process left noted is put in order at the next change or opening.

    Several indexes may share a packet store, see :mod:`kvpacket_rag.owners`; their names are claimed by whoever opens
    them.

    Args:
        index: of rows.
        store: of packets.
        packet_of: names the packet that a row is to have.
        folder: of the index, where processes take turns; None for memory, and where the caller sees to that.

    Attributes:
        threads: that change the index wait for each other here.
    """

    def __init__(
        self,
        index: PacketIndex,
        store: PacketStore,
        packet_of: Callable[[Chunk], str],
        folder: Path | None,
    ) -> None:
        self._index = index
        self._store = store
        self._packet_of = packet_of
        with _making:
            self.threads = _turns.setdefault(index, threading.RLock())
        self._processes = change_lock(folder) if folder else None

    def owners(self, names: Iterable[str]) -> list[str]:
        """Under which names rows own their packets."""
        return owner_names(self._index, self._store, names)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside the ``with`` block no other thread, nor process of the same folder, changes rows; may be nested."""
        with self.threads, self._processes or nullcontext():
            yield

    @contextmanager
    def changing(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Inside the ``with`` block rows of these ids come, change or go; other changes wait.

        Yields:
            For each id an owner for its new packet. Afterwards, also after an error, the packet that the row then
            has is owned by the row alone, and packets that no row has are gone.
        """
        with self.turn():
            noted = self._noted()
            self._note([*noted, *names])
            try:
                yield self._guards(names)
            finally:
                self._settle()

    def recover(self) -> None:
        """Put in order what a killed process left; nothing, if one is at it now, or the folder cannot be written."""
        if self._processes and self._noted():
            with self.threads, suppress(Timeout, OSError, StoreError), self._processes.acquire(timeout=0):
                self.finish()

    def finish(self) -> None:
        """Put in order what is noted, for a caller that holds the folder's lock."""
        if noted := self._noted():  # their rows know best: another framework may have written them
            ids = set(noted)
            self._settle({chunk.chunk_id: name for chunk, name in self._index.rows() if chunk.chunk_id in ids})

    def adopt(self) -> None:
        """Make every row an owner of its packet, which others may have brought into this store."""
        adopt(self._index, self._store)

    def _settle(self, packets: Mapping[str, str] | None = None) -> None:
        """Leave every noted row as owner of its packet and of nothing else; none is without an owner meanwhile."""
        names = self._noted()
        if packets is None:
            packets = {chunk.chunk_id: self._packet_of(chunk) for chunk in self._index.get(names)}
        add_owners(self._store, packets.values(), self._guards(packets))
        self._store.drop_owners(self.owners(names))
        add_owners(self._store, packets.values(), self.owners(packets))
        self._store.drop_owners(self._guards(names))
        self._note([])

    def _guards(self, names: Iterable[str]) -> list[str]:
        return [owner + CHANGING for owner in self.owners(names)]

    def _noted(self) -> list[str]:
        return half_changed(self._index)

    def _note(self, names: Iterable[str]) -> None:
        self._index.set_setting(_NOTED, json.dumps(list(dict.fromkeys(names))))


def half_changed(index: PacketIndex) -> list[str]:
    """Ids of rows that a change was about which did not end: one of a process that was killed, or is at it now.

    Raises:
        StoreError: what is noted is no list of ids.
    """
    try:
        names = json.loads(index.get_setting(_NOTED) or "[]")
    except (ValueError, RecursionError):
        names = None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return names
    raise StoreError(
        "what the index says of its last change is damaged; move its folder away and ingest the documents again"
    )


def finish_changes(index: PacketIndex, store: PacketStore) -> None:
    """Put in order what a killed process left; the caller holds the folder's lock. Needs no model."""
    Ownership(index, store, lambda chunk: chunk.chunk_id, None).finish()
