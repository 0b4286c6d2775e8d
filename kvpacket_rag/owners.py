"""Under which names the rows of an index own their packets.

A packet goes with its last owner. Several indexes may share a packet store, and often have equal ids; so where a store
does not lie with an index, the index's names have a prefix that no other index has, nor a copy of it. In the folder of
an index others own packets too: those that were made for documents of other vector stores, under names such as
``langchain/intro.md``. None of these begins as the names of its rows do; rows of indexes that were built before that
was so own by their bare ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from kvpacket_rag.errors import PacketNotFoundError, StoreError
from kvpacket_rag.index import FILE_NAME, PacketIndex
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.store import DiskStore, PacketStore, RemoteStore, TieredStore

UNOWNED = "is_copy"  # setting of an index: in the store at hand, its rows may own no packets yet
_LOOKED_UP = 16  # packets, before all that a store knows are read
_PREFIX = "owner_prefix"
_PREFIX_IN_FOLDER = "owner_prefix_in_folder"  # where the packets lie with the index, and with no other
_ROW = ":"
_PREFIX_ELSEWHERE = "owner_prefix_elsewhere"  # in stores that are not the index's own
_FOLDER = "owner_folder"  # where the index lay when that was made: a copy has the setting too, and lies elsewhere


def owner_names(index: PacketIndex, store: PacketStore, chunk_ids: Iterable[str]) -> list[str]:
    """Under which names chunks of an index own their packets in a store."""
    own = _has_own(index, store)
    prefix = (not own and index.get_setting(_PREFIX_ELSEWHERE)) or index.get_setting(_PREFIX)
    return [prefix + chunk_id for chunk_id in chunk_ids] if prefix else _names_in_folder(index, chunk_ids)


def _names_in_folder(index: PacketIndex, chunk_ids: Iterable[str]) -> list[str]:
    prefix = index.get_setting(_PREFIX_IN_FOLDER) or ""
    return [prefix + chunk_id for chunk_id in chunk_ids]


def claim(index: PacketIndex, store: PacketStore) -> None:
    """Give an index names that no other index over the store has, and its rows their packets under these."""
    claim_names(index, store)
    if index.get_setting(UNOWNED):
        adopt(index, store)


def claim_names(index: PacketIndex, store: PacketStore) -> None:
    """Give an index names that no other index over the store has; call :func:`adopt` where it is :data:`UNOWNED` then.

    An index that cannot be written keeps what it has: it cannot change either.
    """
    if _has_own(index, store):
        if _is_shared(store) and index.get_setting(_PREFIX) is None:  # it came from a folder of its own
            with suppress(StoreError):
                if len(index):
                    index.set_setting(UNOWNED, "true")
                index.set_setting(_PREFIX, f"{uuid.uuid4()}/")
        return
    prefix = index.get_setting(_PREFIX_ELSEWHERE) or index.get_setting(_PREFIX)
    folder, noted = str(index.folder or ""), index.get_setting(_FOLDER)
    is_copy = bool(noted) and noted != folder and Path(noted or "", FILE_NAME).is_file()
    with suppress(StoreError):
        if not prefix or is_copy:
            prefix = f"{uuid.uuid4()}/"
            if len(index):
                index.set_setting(UNOWNED, "true")
            elif index.get_setting(_PREFIX) is None:
                index.set_setting(_PREFIX, prefix)
            index.set_setting(_PREFIX_ELSEWHERE, prefix)
        if noted != folder:
            index.set_setting(_FOLDER, folder)


def name_new(index: PacketIndex, store: PacketStore) -> None:
    """Give an index that is about to be built names that nobody else has in the store, be that shared or its own."""
    if len(index) or index.get_setting("signature") is not None or index.get_setting(_PREFIX) is not None:
        return
    if _is_shared(store):
        index.set_setting(_PREFIX, f"{uuid.uuid4()}/")
    elif _has_own(index, store):
        index.set_setting(_PREFIX_IN_FOLDER, _ROW)


def adopt(index: PacketIndex, store: PacketStore) -> None:
    """Make every row an owner of its packet, which others may have brought into the store."""
    packets = {chunk.chunk_id: packet for chunk, packet in index.rows()}
    add_owners(store, packets.values(), owner_names(index, store, packets))
    if _has_own(index, store) and _is_shared(store):
        store.drop_owners(_names_in_folder(index, packets))
    index.set_setting(UNOWNED, "")


def add_owners(store: PacketStore, packets: Iterable[str], owners: Iterable[str]) -> None:
    """Name one more owner of each packet; those that the store does not know are left out."""
    for packet, owner in zip(packets, owners, strict=True):
        with suppress(PacketNotFoundError):
            store.add_owner(packet, owner)


def knows_packets(index: PacketIndex, store: PacketStore, signature: PacketSignature) -> bool:
    """Whether a store knows a packet of an index with rows, be it an evicted one."""
    if any(packet in store for _, packet in islice(index.rows(), _LOOKED_UP)):
        return True
    names = {packet for _, packet in index.rows()}
    return any(known.packet_id in names for known in store.known(signature))


def is_used_elsewhere(index: PacketIndex) -> bool:
    """Whether an index on a disk has, or had, its packets in a store that does not lie in its folder."""
    return any(index.get_setting(key) for key in (_PREFIX_ELSEWHERE, _PREFIX, UNOWNED))


def _is_shared(store: PacketStore) -> bool:
    """Whether other indexes have their own packets there, too."""
    return isinstance(store.below if isinstance(store, TieredStore) else store, RemoteStore)


def _has_own(index: PacketIndex, store: PacketStore) -> bool:
    """Whether the packets lie with the index: in its folder, or in the object store it was built with."""
    if isinstance(store, TieredStore):
        return _has_own(index, store.below)
    if isinstance(store, RemoteStore):
        return index.get_setting("remote") == store.url
    return isinstance(store, DiskStore) and store.folder.resolve() == index.folder
