"""Who keeps the packets of an object store alive, told by small objects that any machine can write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import chain
from posixpath import basename

from kvpacket_rag.store.remote_bucket import Bucket


class RemoteOwners:
    """Two marks for each owner of a packet: one below the packet, which counts, and one below the owner, to find it.

    Args:
        bucket: of the packets.
        pool: for requests at the same time.
    """

    def __init__(self, bucket: Bucket, pool: Executor) -> None:
        self._bucket = bucket
        self._pool = pool

    def add(self, packet_id: str, owner: str) -> None:
        """Name an owner; the mark to find it by comes first."""
        below_packet, below_owner = _marks(packet_id, _digest(owner))
        for key in (below_owner, below_packet):
            self._bucket.create(key, [owner.encode(errors="surrogatepass")])

    def drop(self, owners: Sequence[str], erase: Callable[[Sequence[str]], None]) -> list[str]:
        """Forget owners and erase the packets that have none left; returns those.

        The marks to find them by go last, so that the same call ends what was interrupted.
        """
        digests = [_digest(owner) for owner in owners]
        found = list(chain.from_iterable(self._pool.map(self._owned, digests)))
        self._bucket.delete(_marks(packet_id, digest)[0] for packet_id, digest in found)
        packets = list(dict.fromkeys(packet_id for packet_id, _ in found))
        gone = [name for name, left in zip(packets, self._pool.map(self._of, packets), strict=True) if not left]
        erase(gone)
        self._bucket.delete(_marks(packet_id, digest)[1] for packet_id, digest in found)
        return gone

    def drop_all(self, packet_id: str) -> None:
        """Forget all owners of a packet."""
        marks = [_marks(packet_id, digest) for digest in self._of(packet_id)]
        self._bucket.delete(below for below, _ in marks)
        self._bucket.delete(below for _, below in marks)

    def _of(self, packet_id: str) -> list[str]:
        """Digests of a packet's owners."""
        return [basename(key) for key, _ in self._bucket.list(f"owners/{packet_id}/")]

    def _owned(self, digest: str) -> Iterable[tuple[str, str]]:
        return [(basename(key), digest) for key, _ in self._bucket.list(f"owned/{digest}/")]


def _digest(owner: str) -> str:
    """An owner's name as part of a key."""
    return hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()


def _marks(packet_id: str, digest: str) -> tuple[str, str]:
    """The keys of both."""
    return f"owners/{packet_id}/{digest}", f"owned/{digest}/{packet_id}"
