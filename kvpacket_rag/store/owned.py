"""Who owns what in a store on disk: read as a whole, to be compared with what owners say themselves."""

from __future__ import annotations

from kvpacket_rag.store.changes import EVICTED, QUARANTINED, STORED
from kvpacket_rag.store.disk import DiskStore
from kvpacket_rag.store.schema import owner_digest


def ownerships(store: DiskStore) -> set[tuple[str, str]]:
    """Packet id and owner of each that says what was written; the others are told by :meth:`DiskStore.check`."""
    rows = store._catalogue.owned()
    texts = [row for row in rows if isinstance(row[0], str) and isinstance(row[1], str)]
    return {(packet_id, owner) for packet_id, owner, digest in texts if owner_digest(packet_id, owner) == digest}


def known_packets(store: DiskStore) -> set[str]:
    """Every packet that a store knows, evicted and damaged ones included."""
    return {name for state in (STORED, EVICTED, QUARANTINED) for name in store._catalogue.ids(state)}
