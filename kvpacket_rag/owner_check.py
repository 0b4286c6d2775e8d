"""Whether the rows of an index own the packets in its folder, and nothing else there is owned in their name.

Rows and owners lie in two files, of which one may be lost, or put back from a copy of another day. A packet that is
owned in the name of a row that is gone would stay for ever, with its text; and one that its row does not own would
outlive it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.owners import add_owners, is_used_elsewhere, owner_names
from kvpacket_rag.ownership import CHANGING
from kvpacket_rag.store import DiskStore, PacketStore
from kvpacket_rag.store.owned import known_packets, ownerships


@dataclass(frozen=True, slots=True)
class OwnerCheck:
    """Where an index and the packets in its folder do not agree.

    Attributes:
        rowless: owners by the names of rows that are not there, and their packets.
        unowned: chunks whose packets are known and not theirs, and these packets.
    """

    rowless: dict[str, str] = field(default_factory=dict)
    unowned: dict[str, str] = field(default_factory=dict)

    def repair(self, index: PacketIndex, store: PacketStore) -> None:
        """Give the rows their packets, and delete those that no row has; others' owners stay as they are."""
        add_owners(store, self.unowned.values(), owner_names(index, store, self.unowned))
        if self.rowless:
            store.drop_owners(self.rowless)


def check_owners(index: PacketIndex, store: PacketStore) -> OwnerCheck:
    """Compare owners with rows, where the packets lie with the index; what is just being changed counts for right.

    Where rows own by their bare ids, as in folders of earlier versions, others' owners may look the same: none is said
    to be without a row then.

    Args:
        index: whose rows are whole.
        store: in its folder; of others nothing is said, for other indexes may have packets there.
    """
    if not isinstance(store, DiskStore) or store.folder.resolve() != index.folder or index.get_setting("remote"):
        return OwnerCheck()
    # Packets come before their rows and go after them, and the journal knows of both; in this order, and with owners
    # read twice, what another process does meanwhile is seen at one end at least.
    before = ownerships(store)
    unsettled = set(owner_names(index, store, OwnerJournal(index, store).chunk_ids()))
    packets = {chunk.chunk_id: packet_id for chunk, packet_id in index.rows()}
    after, known = ownerships(store), known_packets(store)
    names = dict(zip(owner_names(index, store, packets), packets, strict=True))
    (prefix,) = owner_names(index, store, [""])
    rowless = {
        owner: packet_id
        for packet_id, owner in before & after
        if prefix and owner.startswith(prefix) and not owner.endswith(CHANGING)
        if owner not in names and owner not in unsettled
    }
    owned = {(packet_id, owner.removesuffix(CHANGING)) for packet_id, owner in before | after}
    unowned = {
        chunk_id: packets[chunk_id]
        for owner, chunk_id in names.items()
        if packets[chunk_id] in known and (packets[chunk_id], owner) not in owned
    }
    has_none = not any((packet_id, owner) in owned for owner, packet_id in zip(names, packets.values(), strict=True))
    return OwnerCheck(rowless, {} if has_none and is_used_elsewhere(index) else unowned)


def knows_none(index: PacketIndex, store: PacketStore) -> bool:
    """Whether a store knows no packet of an index with rows that has its packets there, not even an evicted one.

    Args:
        index: whose rows are whole.
        store: in its folder, or the object store it was built with.
    """
    if index.get_setting("signature") is None or (is_used_elsewhere(index) and not index.get_setting("remote")):
        return False
    packets = {packet_id for _, packet_id in index.rows()}
    if isinstance(store, DiskStore):
        return bool(packets) and packets.isdisjoint(known_packets(store))
    return bool(packets) and not any(packet_id in store for packet_id in packets)
