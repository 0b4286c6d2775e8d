"""Whose packets are whose: a row of an index owns the packet of its text, and no other."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import Timeout

from kvpacket_rag import Chunk, PacketIndex, PacketNotFoundError, PacketStore
from kvpacket_rag.journal import OWNER_PREFIX, change_lock

IS_COPY = "is_copy"  # until a copied index is first opened: in that store, its rows may own no packets yet
_NOTED = "unsettled_nodes"


class Ownership:
    """Keeps owners in a packet store in step with the rows of an index.

    Rows and packets lie in two databases, and no transaction spans both. So what is about to change is noted in
    the index first, and what a killed process left noted is put in order at the next change or opening.

    Several indexes may share a packet store, and often have equal ids. So a row owns its packet under its id and a
    prefix of its index's own, which is empty where the index's folder holds the packets too, as the package's own
    pipeline has it.

    Args:
        index: of rows.
        store: of packets.
        packet_of: names the packet of a row.
        folder: of the index, where processes take turns; None for memory.
        alone: the store serves this index alone.
    """

    def __init__(
        self,
        index: PacketIndex,
        store: PacketStore,
        packet_of: Callable[[Chunk], str],
        folder: Path | None,
        alone: bool,
    ) -> None:
        self._index = index
        self._store = store
        self._packet_of = packet_of
        self.threads = threading.RLock()
        self._processes = change_lock(folder) if folder else None
        if index.get_setting(OWNER_PREFIX) is None and not len(index):
            index.set_setting(OWNER_PREFIX, "" if alone else f"{uuid.uuid4()}/")

    def owners(self, names: Iterable[str]) -> list[str]:
        """Under which names rows own their packets."""
        prefix = self._index.get_setting(OWNER_PREFIX) or ""
        return [prefix + name for name in names]

    @contextmanager
    def changing(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Inside the ``with`` block rows of these ids come, change or go; other changes wait.

        Yields:
            For each id an owner for its new packet. Afterwards, also after an error, the packet that the row then
            has is owned by the row alone, and packets that no row has are gone.
        """
        with self.threads, self._processes or nullcontext():
            noted = self._noted()
            self._note([*noted, *names])
            try:
                yield self._guards(names)
            finally:
                self._settle()

    def recover(self) -> None:
        """Put in order what a killed process left; nothing, if one is at it now."""
        if self._processes and self._noted():
            with self.threads, suppress(Timeout), self._processes.acquire(timeout=0):
                self._settle()

    def adopt(self) -> None:
        """Make every row an owner of its packet, which others may have brought into this store."""
        packets = {chunk.chunk_id: packet for chunk, packet in self._index.rows()}
        self._own(packets.values(), self.owners(packets))
        self._index.set_setting(IS_COPY, "")

    def _settle(self) -> None:
        """Leave every noted row as owner of its packet and of nothing else; none is without an owner meanwhile."""
        names = self._noted()
        packets = {chunk.chunk_id: self._packet_of(chunk) for chunk in self._index.get(names)}
        self._own(packets.values(), self._guards(packets))
        self._store.drop_owners(self.owners(names))
        self._own(packets.values(), self.owners(packets))
        self._store.drop_owners(self._guards(names))
        self._note([])

    def _own(self, packets: Iterable[str], owners: Iterable[str]) -> None:
        for packet, owner in zip(packets, owners, strict=True):
            with suppress(PacketNotFoundError):  # of a row whose packet somebody deleted
                self._store.add_owner(packet, owner)

    def _guards(self, names: Iterable[str]) -> list[str]:
        return [f"{owner}\n(changing)" for owner in self.owners(names)]

    def _noted(self) -> list[str]:
        names: list[str] = json.loads(self._index.get_setting(_NOTED) or "[]")
        return names

    def _note(self, names: Iterable[str]) -> None:
        self._index.set_setting(_NOTED, json.dumps(list(dict.fromkeys(names))))
