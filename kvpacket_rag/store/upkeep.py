"""Keeps the files of a disk store and the rows of its catalogue in step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from kvpacket_rag.errors import PacketCorruptError, PacketNotFoundError, StoreError, StoreFullError
from kvpacket_rag.store.catalogue import Catalogue
from kvpacket_rag.store.changes import FILE_MISSING, QUARANTINED, STORED, CatalogueChanges
from kvpacket_rag.store.eviction import Candidate, Eviction
from kvpacket_rag.store.folder import StoreFolder
from kvpacket_rag.store.holds import Holds
from kvpacket_rag.store.metrics import StoreMetrics
from kvpacket_rag.store.packet_file import FileStamp
from kvpacket_rag.store.protocol import is_packet_id
from kvpacket_rag.store.reads import Reads

logger = logging.getLogger(__name__)

LAST_SWEEP = "last_sweep"  # seconds since 1970, noted in the catalogue
_SWEEP_WAIT_SECONDS = 2.0  # a writer that takes longer is left alone, and the sweep to the next opening


@dataclass(frozen=True, slots=True)
class Disorder:
    """Where files and rows disagree, as a killed process leaves them.

    Attributes:
        orphans: packet files no row speaks of.
        quarantined_orphans: the same among those set aside.
        missing: rows whose file is gone.
        strays: temporary files, and links in place of folders.
    """

    orphans: int = 0
    quarantined_orphans: int = 0
    missing: int = 0
    strays: int = 0

    def __bool__(self) -> bool:
        return bool(self.orphans or self.quarantined_orphans or self.missing or self.strays)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a store may be, and what goes first.

    Attributes:
        max_bytes: cap on all packet files, or None.
        eviction: ``"lru"`` or ``"cost"``.
    """

    max_bytes: int | None
    eviction: Eviction


class Upkeep:
    """Eviction, deletion, quarantine and sweeping: each ends with rows that tell what files there are.

    Files are written and deleted inside transactions, one writer at a time over all processes. So whoever holds
    a transaction knows that a temporary file is nobody's, and that a file without a row is left over.
    """

    def __init__(
        self, folder: StoreFolder, catalogue: Catalogue, reads: Reads, limits: Limits, metrics: StoreMetrics
    ) -> None:
        self._folder = folder
        self._catalogue = catalogue
        self._reads = reads
        self._limits = limits
        self._metrics = metrics
        self.holds = Holds()

    def keep_cap(self) -> None:
        """Bring the files of a store that was just opened under the cap, by sizes and counts that can be believed."""
        if self._limits.max_bytes is None:
            return
        wrong, miscounted = self._catalogue.wrong_sizes(), not self._catalogue.counts_are_right()
        if not wrong and not miscounted and self._catalogue.totals().size_bytes <= self._limits.max_bytes:
            return
        with self._catalogue.transaction() as changes:
            for packet_id in wrong:
                row = changes.find(packet_id)
                if row is not None and row.state == STORED and self._folder.holds(packet_id):
                    changes.resize(packet_id, self._folder.stamp(packet_id).size_bytes)
                else:
                    self._drop_file(changes, packet_id)
                    changes.evict(packet_id, FILE_MISSING)
            if wrong or miscounted:
                changes.count_anew()
            self.make_room(changes, 0)

    def make_room(self, changes: CatalogueChanges, size_bytes: int) -> bool:
        """Delete files until ``size_bytes`` more fit under the cap; False if they did already.

        Raises:
            StoreFullError: they cannot fit beside what running requests hold.
        """
        max_bytes = self._limits.max_bytes
        if max_bytes is None or changes.size_bytes() + size_bytes <= max_bytes:
            return False
        changes.touch(self._reads.take_uses())
        with self.holds.frozen() as held:
            chosen = self._victims(changes, size_bytes - max_bytes, held)
            if chosen is None:
                changes.count_anew()  # a damaged count must not make the store refuse for ever
                chosen = self._victims(changes, size_bytes - max_bytes, held)
            if chosen is None:
                raise StoreFullError(
                    f"a packet of {size_bytes} bytes does not fit under the cap of {max_bytes} bytes beside "
                    "what running requests hold; raise max_bytes"
                )
            for packet_id, _, freed in chosen:
                self._drop_file(changes, packet_id)
                changes.evict(packet_id, "evicted to stay under the byte cap")
                self._reads.forget(packet_id)
                self._metrics.count(evictions=1, bytes_evicted=freed)
        return True

    def _victims(self, changes: CatalogueChanges, beyond: int, held: Set[str]) -> list[Candidate] | None:
        return changes.choose_victims(changes.size_bytes() + beyond, held, self._limits.eviction)

    def _drop_file(self, changes: CatalogueChanges, packet_id: str) -> None:
        """Delete a packet's file; a damaged or forged row that names none goes itself."""
        if is_packet_id(packet_id):
            self._folder.remove(packet_id)
        else:
            changes.remove(packet_id)

    def discard(self, packet_ids: Sequence[str]) -> None:
        """Delete the files of packets whose rows are gone: after a crash between the two, nobody sees the file."""
        if not packet_ids:
            return
        with self._catalogue.transaction() as changes:
            for packet_id in packet_ids:
                if changes.find(packet_id) is None:  # else another writer stored it again meanwhile
                    self._drop_file(changes, packet_id)
                self._reads.forget(packet_id)

    def note_missing(self, packet_id: str) -> None:
        """Correct the row of a packet whose file is gone; a catalogue that cannot be written changes nothing of that.

        Raises:
            PacketNotFoundError: the row could not be corrected.
        """
        try:
            with self._catalogue.transaction() as changes:
                row = changes.find(packet_id)
                if row is not None and row.state == STORED and not self._folder.holds(packet_id):
                    changes.evict(packet_id, FILE_MISSING)
        except StoreError as error:
            raise PacketNotFoundError(f"the file of packet {packet_id!r} is missing, and {error}") from error

    def set_aside(self, packet_id: str, stamp: FileStamp, reason: str) -> bool:
        """Quarantine a damaged file; False when a whole one may have taken its place.

        Raises:
            PacketCorruptError: it could not be moved; it stays where it is and is refused every time.
        """
        try:
            with self._catalogue.transaction() as changes:
                row = changes.find(packet_id)
                if row is None or row.state != STORED or not self._folder.holds(packet_id, stamp):
                    return False
                self._folder.set_aside(packet_id)
                changes.set_aside(packet_id, stamp.size_bytes, reason)
        except StoreError as error:
            raise PacketCorruptError(f"packet {packet_id!r} is damaged: {reason}; {error}") from error
        self._reads.forget(packet_id)
        return True

    def disorder(self) -> Disorder:
        """Where files and rows disagree; a writer at work may look like a little of it."""
        return self._compare()[0]

    def sweep(self) -> Disorder:
        """Put right what killed processes left; nothing where nothing can be written, or a writer is in the way."""
        found, suspects, strays = self._compare()
        try:
            with self._catalogue.transaction(wait_seconds=_SWEEP_WAIT_SECONDS) as changes:
                for stray in strays:
                    self._folder.clear(stray)
                for packet_id in suspects:
                    self._settle(changes, packet_id)
                changes.note(LAST_SWEEP, str(int(time.time())))
        except StoreError as error:
            logger.info("the store is not swept: %s", str(error))
        return found

    def _compare(self) -> tuple[Disorder, set[str], list[Path]]:
        files = self._folder.contents()
        stored, quarantined = self._catalogue.ids(STORED), self._catalogue.ids(QUARANTINED)
        orphans, aside = files.packets - stored, files.quarantined - quarantined
        missing = (stored - files.packets) | (quarantined - files.quarantined)
        found = Disorder(len(orphans), len(aside), len(missing), len(files.strays))
        return found, orphans | aside | missing, files.strays

    def _settle(self, changes: CatalogueChanges, packet_id: str) -> None:
        """Make file and row of one packet agree, whatever happened to either since they were listed."""
        if not is_packet_id(packet_id):
            changes.remove(packet_id)
            return
        row = changes.find(packet_id)
        state = row.state if row else ""
        if state != STORED:
            self._folder.withdraw(packet_id)
        if state != QUARANTINED:
            self._folder.forget_damaged(packet_id)
        present = self._folder.holds(packet_id) if state == STORED else self._folder.is_set_aside(packet_id)
        if state in (STORED, QUARANTINED) and not present:
            changes.evict(packet_id, FILE_MISSING)
