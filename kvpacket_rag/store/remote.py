"""Packets in an object store that many machines share, and a folder of each machine as a cache before it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from posixpath import basename
from threading import Lock
from typing import Any, Self

from kvpacket_rag.errors import PacketCorruptError, PacketError, PacketNotFoundError, StoreError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.check import OnBytes, StoreCheck
from kvpacket_rag.store.eviction import Eviction
from kvpacket_rag.store.metrics import StoreMetrics, Tier
from kvpacket_rag.store.packet_file import packet_parts
from kvpacket_rag.store.protocol import KnownChunk, require_packet_id
from kvpacket_rag.store.remote_bucket import Bucket
from kvpacket_rag.store.remote_cache import RemoteCache, tied_to
from kvpacket_rag.store.remote_mark import Mark
from kvpacket_rag.store.remote_owners import RemoteOwners
from kvpacket_rag.store.remote_record import packet_key, quarantine_key, record_key
from kvpacket_rag.store.remote_transfer import Transfer

logger = logging.getLogger(__name__)

_BATCH = 200  # records learnt in one transaction


class RemoteStore:
    """A :class:`~kvpacket_rag.store.PacketStore` below a URL, read by way of a folder on the local disk.

    The object store is the truth. Packets are put once, under names of their content, and never changed; a packet's
    record, with its text, is put after it, so what has a record is whole. A packet that is read comes into the cache,
    is verified like every file, and stays until the byte cap needs its room, by which nothing is lost. What a prompt
    needs is fetched at the same time, as soon as the prompt is known. A packet that is damaged in the object store is
    moved aside there, and its chunk is encoded again.

    What other machines put or delete shows within ``refresh_seconds``, or by :meth:`refresh`; until then, a packet
    that another one deleted is a miss at most. Where one machine names an owner of a packet at the moment in which
    another drops its last one, the packet may go all the same; its chunk is then encoded again. An object store that
    does not answer costs misses, not answers, and what the cache has is given.

    Args:
        url: such as ``s3://bucket/prefix``; see :class:`~kvpacket_rag.store.remote_bucket.Bucket`, also for
            credentials.
        cache: the folder, one for each URL below the user's cache folder by default. A store on disk that lies there
            already is uploaded.
        max_bytes: cap on the packets in the cache and on their way into it, but for one of these.
        eviction: what makes room there; see :class:`~kvpacket_rag.store.DiskStore`.
        refresh_seconds: how often other machines' changes are looked for, beside the work.
        threads: requests at a time.
        sweep: of the cache; see :class:`~kvpacket_rag.store.DiskStore`.
        options: of the :class:`~kvpacket_rag.store.remote_bucket.Bucket`.

    Attributes:
        metrics: what came from the object store and went there; for the cache see :attr:`tiers`.

    Raises:
        MissingExtraError: obstore is not installed.
        StoreError: no credentials, no such bucket, or no answer; or the folder is the cache of another URL, or of a
            share that is not mounted.
    """

    def __init__(
        self,
        url: str,
        cache: Path | str | None = None,
        max_bytes: int | None = None,
        *,
        eviction: Eviction = "lru",
        refresh_seconds: float = 60.0,
        threads: int = 8,
        sweep: bool = True,
        **options: Any,
    ) -> None:
        folder = _default_cache(url) if cache is None else cache
        is_known = tied_to(folder) == url.rstrip("/")  # a folder that is gone may only not be mounted then
        self._bucket = Bucket(url, **{"create": not is_known} | options)
        self._bucket.probe()
        self.metrics = StoreMetrics()
        self._cache = RemoteCache(folder, max_bytes, eviction=eviction, sweep=sweep)
        self._pool = ThreadPoolExecutor(threads, "kvpacket-remote")
        self._behind = ThreadPoolExecutor(1, "kvpacket-refresh")  # its work needs the others
        self._owners = RemoteOwners(self._bucket, self._pool)
        self._refresh_seconds = refresh_seconds
        self._next_refresh = 0.0
        self._lock = Lock()
        try:
            self._mark = Mark(self._bucket, self._cache, may_write=options.get("create", True))
            self._transfer = Transfer(self._bucket, self._cache, self._mark, self._pool, self.metrics)
            self._upload_all()
            self.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where the packets are."""
        return self._bucket.url

    def put(self, packet: Packet, text: str, owner: str | None = None, *, only_known: bool = False) -> None:
        """See :meth:`PacketStore.put`; into the object store, and into the cache if it has room."""
        name = packet.packet_id
        require_packet_id(name)
        row = self._cache.row(name)
        if row is not None:
            packet.signature.require(PacketSignature.from_json(row.signature), name)
        if self._cache.is_there(name):
            if owner is not None:
                self.add_owner(name, owner)
            return
        if only_known and (row is None or self._transfer.record(name) is None):
            return
        parts = packet_parts(packet)
        record = self._transfer.upload(packet, text, parts)
        if owner is not None:
            self._owners.add(name, owner)
        self._cache.learn([record])
        self._transfer.keep(packet, text, parts)
        if owner is not None:
            self._cache.name_owner(name, owner)

    def get(self, packet_id: str, signature: PacketSignature) -> Packet:
        """See :meth:`PacketStore.get`; from the cache, or else from the object store."""
        require_packet_id(packet_id)
        packet = self._transfer.fetched(packet_id)
        if packet is None:
            try:
                return self._cache.get(packet_id, signature)
            except (PacketNotFoundError, PacketCorruptError) as error:
                logger.debug("the cache does not have packet %s: %s", packet_id, str(error))
            packet = self._transfer.fetch(packet_id)
            self.metrics.count(hits=1)
        if packet is None:
            return self._cache.get(packet_id, signature)
        signature.require(packet.signature, packet_id)
        return packet

    def __contains__(self, packet_id: object) -> bool:
        return self._cache.is_there(packet_id)

    def add_owner(self, packet_id: str, owner: str) -> None:
        """See :meth:`PacketStore.add_owner`."""
        require_packet_id(packet_id)
        if self._cache.row(packet_id) is None:
            raise PacketNotFoundError(f"packet {packet_id!r} is not in this store; put it before naming an owner")
        if not self._cache.is_owner(packet_id, owner):
            self._owners.add(packet_id, owner)
            self._cache.name_owner(packet_id, owner)

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """See :meth:`PacketStore.drop_owners`."""
        names = list(dict.fromkeys(owners))
        self._mark.require()
        gone = self._owners.drop(names, self._erase)
        self._cache.drop_owners(names)
        return self._cache.forget(gone)

    def delete(self, packet_id: str) -> None:
        """See :meth:`PacketStore.delete`."""
        require_packet_id(packet_id)
        self._mark.require()
        self._erase([packet_id])
        self._owners.drop_all(packet_id)
        self._cache.delete(packet_id)

    def known(self, signature: PacketSignature) -> Iterator[KnownChunk]:
        """See :meth:`PacketStore.known`."""
        return self._cache.known(signature)

    def signatures(self) -> dict[str, int]:
        """See :meth:`PacketStore.signatures`."""
        return self._cache.there()

    def revision(self) -> int:
        """See :meth:`PacketStore.revision`; has other machines' changes looked for when that is due."""
        with self._lock:
            due = time.monotonic() >= self._next_refresh
            if due:
                self._next_refresh = time.monotonic() + self._refresh_seconds
        if due:
            self._behind.submit(self._try_refresh)
        return self._cache.revision()

    @contextmanager
    def hold(self, packet_ids: Iterable[str]) -> Iterator[None]:
        """See :meth:`PacketStore.hold`; those that are not in the cache are fetched from here on."""
        names = list(packet_ids)
        try:
            with self._cache.hold(names):
                self._transfer.read_ahead(names)
                yield
        finally:
            self._transfer.release(names)

    def refresh(self) -> None:
        """Learn what other machines put and deleted; a cache that cannot be written stays as it is.

        Raises:
            StoreError: the object store does not answer, or lacks all that it had, as a share does that is not mounted.
        """
        self._next_refresh = time.monotonic() + self._refresh_seconds
        if self._cache.is_read_only:
            logger.info("%s cannot be written, so it is read as it is", self._cache.folder)
            return
        before = self._cache.ids()  # what is put from here on may be missing in the list
        listed = {basename(key).removesuffix(".json") for key, _ in self._bucket.list("chunks/")}
        gone = before - listed
        if gone:
            self._mark.require(is_empty=not listed)
        if listed:
            self._mark.put()
        new = sorted(listed - before)
        for start in range(0, len(new), _BATCH):
            found = [record for record in self._pool.map(self._transfer.record, new[start : start + _BATCH]) if record]
            self._cache.learn(sorted(found, key=lambda record: record.stored_ns))
        self._transfer.drop(gone)
        self._cache.forget(gone)

    def __len__(self) -> int:
        return sum(self._cache.there().values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all packets in the object store, those moved aside included; lists it."""
        return sum(size for prefix in ("packets/", "quarantine/") for _, size in self._bucket.list(prefix))

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """See :attr:`PacketStore.tiers`."""
        return {"disk": self._cache, "remote": self}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def check(self, *, repair: bool = False, progress: OnBytes | None = None) -> StoreCheck:
        """Verify every row and every file of the cache; see :meth:`DiskStore.check`."""
        return self._cache.check(repair=repair, progress=progress)

    def close(self) -> None:
        """Let transfers end and close the cache; a second call does nothing."""
        for pool in (self._behind, self._pool):
            pool.shutdown(cancel_futures=True)
        self._cache.close()

    def _upload_all(self) -> None:
        """Put into the object store what a store on disk had before it became this one's cache."""
        for name, signature, text, owners in self._cache.rows_to_upload(self.url):
            try:
                packet = self._cache.get(name, PacketSignature.from_json(signature))
            except PacketError as error:
                logger.warning("packet %s is not uploaded: %s", name, str(error))
                continue
            self._cache.learn([self._transfer.upload(packet, text, packet_parts(packet))])
            for owner in owners:
                self._owners.add(name, owner)
        self._cache.tie(self.url)

    def _erase(self, packet_ids: Iterable[str]) -> None:
        """Tensors first: a record alone is a miss, and it is found again when this is interrupted."""
        for name in packet_ids:
            self._bucket.delete([packet_key(name), quarantine_key(name), record_key(name)])
            self._transfer.drop([name])

    def _try_refresh(self) -> None:
        try:
            self.refresh()
        except StoreError as error:
            logger.warning("what other machines stored is looked for later: %s", str(error))


def _default_cache(url: str) -> Path:
    from kvpacket_rag.models import cache_dir  # late: brings transformers

    return cache_dir() / "packets" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
