"""Looks through a whole store: every row, every file, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpacket_rag.errors import PacketCorruptError, PacketError
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.store.catalogue import Catalogue
from kvpacket_rag.store.changes import QUARANTINED, STORED
from kvpacket_rag.store.folder import StoreFolder
from kvpacket_rag.store.packet_file import read_packet
from kvpacket_rag.store.protocol import is_packet_id
from kvpacket_rag.store.schema import row_digest
from kvpacket_rag.store.upkeep import LAST_SWEEP, Disorder, Upkeep

OnBytes = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class StoreState:
    """A store by its catalogue.

    Attributes:
        packets: stored now.
        evicted: packets whose texts are known and whose files are gone.
        quarantined: packets set aside as damaged.
        size_bytes: of all files.
        signatures: stored packets by signature.
        disorder: where files and rows disagree.
        last_sweep: seconds since 1970, or None if never.
    """

    packets: int
    evicted: int
    quarantined: int
    size_bytes: int
    signatures: dict[str, int]
    disorder: Disorder
    last_sweep: int | None


@dataclass(slots=True)
class StoreCheck:
    """What was found by looking through a store.

    Attributes:
        packets: files found whole.
        bytes_read: of all files that were verified.
        damaged_rows: ids of rows that do not say what was written, or whose packets' owners do not.
        damaged_packets: damage by packet id.
        faults: of the catalogue's structure, as SQLite tells them.
        disorder: where files and rows disagreed.
        wrong_counts: whether the noted counts were not those of the rows.
        repaired: whether all of this has been put right.
    """

    packets: int = 0
    bytes_read: int = 0
    damaged_rows: list[str] = field(default_factory=list)
    damaged_packets: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    disorder: Disorder = field(default_factory=Disorder)
    wrong_counts: bool = False
    repaired: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.damaged_rows or self.damaged_packets or self.faults or self.disorder or self.wrong_counts)


def state(catalogue: Catalogue, upkeep: Upkeep) -> StoreState:
    """A store as its catalogue and its folders show it; no packet is read."""
    totals, swept = catalogue.totals(), catalogue.fact(LAST_SWEEP)
    return StoreState(
        packets=totals.stored,
        evicted=len(catalogue.ids("evicted")),
        quarantined=len(catalogue.ids(QUARANTINED)),
        size_bytes=totals.size_bytes,
        signatures=catalogue.signatures(),
        disorder=upkeep.disorder(),
        last_sweep=int(swept) if swept and swept.isdecimal() else None,
    )


def check(
    folder: StoreFolder, catalogue: Catalogue, upkeep: Upkeep, *, repair: bool, progress: OnBytes | None
) -> StoreCheck:
    """Verify every row and every file of a store.

    Args:
        folder: of the store.
        catalogue: of the store.
        upkeep: sets aside and sweeps.
        repair: set damaged packets aside, forget damaged rows with their files, sweep, count anew, make SQLite's
            indexes anew, and write the catalogue without gaps. What is set aside is encoded again when its chunk is
            next asked for.
        progress: called with bytes read and bytes in all.
    """
    found = StoreCheck(faults=catalogue.faults())
    if repair:
        with catalogue.transaction() as changes:
            changes.rebuild_indexes()
    found.disorder = upkeep.disorder()
    for packet_id, signature, text, num_tokens, digest in catalogue.rows():
        if not is_packet_id(packet_id) or row_digest(packet_id, signature, text, num_tokens) != digest:
            found.damaged_rows.append(packet_id)
    found.damaged_rows += set(catalogue.damaged_owners()) - set(found.damaged_rows)
    _verify(folder, catalogue, upkeep, found, repair, progress)
    found.wrong_counts = not catalogue.counts_are_right()
    if repair:
        _repair(catalogue, upkeep, found)
    return found


def _verify(
    folder: StoreFolder,
    catalogue: Catalogue,
    upkeep: Upkeep,
    found: StoreCheck,
    repair: bool,
    progress: OnBytes | None,
) -> None:
    """Read every stored packet whose row is to be believed; damaged ones are set aside if asked to."""
    names = sorted(name for name in catalogue.ids(STORED) - set(found.damaged_rows) if is_packet_id(name))
    total = catalogue.counted()[1]
    for packet_id in names:
        row = catalogue.find(packet_id)
        if row is None or row.state != STORED:
            continue  # deleted or evicted meanwhile
        try:
            stamp = folder.stamp(packet_id)
            signature = PacketSignature.from_json(row.signature)
            read_packet(folder.path_of(packet_id), packet_id, signature, verify=True)
            found.packets += 1
            if row.size_bytes != stamp.size_bytes:
                found.damaged_rows.append(packet_id)
        except FileNotFoundError:
            continue  # counted as missing, or deleted meanwhile
        except (PacketCorruptError, PacketError) as error:
            found.damaged_packets[packet_id] = str(error)
            if repair:
                upkeep.set_aside(packet_id, stamp, str(error))
        found.bytes_read += stamp.size_bytes
        if progress is not None:
            progress(found.bytes_read, max(total, found.bytes_read))


def _repair(catalogue: Catalogue, upkeep: Upkeep, found: StoreCheck) -> None:
    """Forget damaged rows, sweep, count anew, compact."""
    with catalogue.transaction(durable=True) as changes:
        for packet_id in found.damaged_rows:
            changes.remove(packet_id)
        changes.disown_damaged()
        changes.drop_nameless()
    upkeep.sweep()
    with catalogue.transaction() as changes:
        changes.count_anew()
    catalogue.compact()
    found.repaired = not catalogue.faults()
