"""What every packet store does, and the two checks they all make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvpacket_rag.errors import PacketError, StoreError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.metrics import Tier

_PACKET_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KnownChunk:
    """A chunk text the store knows, whether or not its packet is still stored.

    Attributes:
        packet_id: the packet that stands for the text.
        text: the chunk's text, edges stripped.
        num_tokens: tokens of the text.
    """

    packet_id: str
    text: str
    num_tokens: int


@runtime_checkable
class PacketStore(Protocol):
    """Packets by id, the texts they stand for, and the owners that keep them.

    Thread safe. A packet is visible only when it is whole. Its text stays known while it has
    owners, even when the packet itself was evicted or set aside as damaged.
    """

    def put(self, packet: Packet, text: str, owner: str | None = None, *, only_known: bool = False) -> None:
        """Store a packet and the text it stands for; a stored one only gains the owner.

        Args:
            packet: what to store.
            text: the chunk's text, edges stripped.
            owner: who keeps the packet alive, such as a chunk id. Without owner it may be evicted and forgotten.
            only_known: do nothing unless the store still knows the chunk, so that what was deleted stays so.

        Raises:
            StoreFullError: no room on the disk or under the byte cap; nothing is left behind.
            StoreError: the store cannot be written.
        """
        ...

    def get(self, packet_id: str, signature: PacketSignature) -> Packet:
        """The packet, proved whole and made with ``signature``. Read its tensors, never write them.

        Raises:
            PacketNotFoundError: not stored, or evicted.
            PacketMismatchError: made by another model, adapter or dtype; no tensor was read.
            PacketCorruptError: damaged; it has been set aside and is no longer in the store.
            StoreError: the store cannot be read.
        """
        ...

    def __contains__(self, packet_id: object) -> bool:
        """Whether the packet is stored and readable now."""
        ...

    def add_owner(self, packet_id: str, owner: str) -> None:
        """Name one more owner of a known packet.

        Raises:
            PacketNotFoundError: the store does not know the packet.
        """
        ...

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """Forget owners and delete, text and tensors, each packet whose last owner went; returns their ids."""
        ...

    def delete(self, packet_id: str) -> None:
        """Delete a packet, its text and its owners at once; an unknown one is no error."""
        ...

    def known(self, signature: PacketSignature) -> Iterator[KnownChunk]:
        """The chunk texts of that signature, evicted and damaged packets included, oldest first."""
        ...

    def signatures(self) -> dict[str, int]:
        """Number of stored packets by signature, as its canonical JSON text."""
        ...

    def revision(self) -> int:
        """A number that changes whenever the known texts change, also by another process."""
        ...

    def hold(self, packet_ids: Iterable[str]) -> AbstractContextManager[None]:
        """Inside the ``with`` block, none of these packets is evicted by this process."""
        ...

    def __len__(self) -> int:
        """Number of packets stored now."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes the packets take now, those set aside as damaged included."""
        ...

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """Bytes and counts by the kind of memory, fastest first."""
        ...

    def close(self) -> None:
        """Release files and memory; a second call does nothing."""
        ...


def is_packet_id(packet_id: object) -> bool:
    """Whether it can name a packet, and so become part of a path."""
    return isinstance(packet_id, str) and _PACKET_ID.fullmatch(packet_id) is not None


def require_packet_id(packet_id: str) -> None:
    """Refuse a name that is no packet id, before it can become a path.

    Raises:
        PacketError: not 64 lower-case hex characters.
    """
    if not is_packet_id(packet_id):
        raise PacketError(
            f"{str(packet_id)[:80]!r} is no packet id; expected the 64 lower-case hex characters packet_id() gives"
        )


def require_byte_cap(max_bytes: int | None) -> None:
    """Refuse a byte cap that no packet fits under.

    Raises:
        StoreError: the cap is not positive.
    """
    if max_bytes is not None and max_bytes <= 0:
        raise StoreError(f"max_bytes is {max_bytes}; expected a positive number of bytes, or None for no cap")
