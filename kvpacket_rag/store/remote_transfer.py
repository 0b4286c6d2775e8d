"""Packets on their way to and from an object store; what comes from there is proved whole before anybody reads it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition, Lock

from kvpacket_rag.errors import PacketCorruptError, PacketNotFoundError, StoreError, StoreFormatError, StoreFullError
from kvpacket_rag.packet import Packet, PacketSignature
from kvpacket_rag.store.metrics import StoreMetrics
from kvpacket_rag.store.packet_file import read_packet
from kvpacket_rag.store.remote_bucket import Bucket
from kvpacket_rag.store.remote_cache import RemoteCache
from kvpacket_rag.store.remote_mark import Mark
from kvpacket_rag.store.remote_record import MAX_RECORD_BYTES, ChunkRecord, packet_key, quarantine_key, record_key

logger = logging.getLogger(__name__)

_DOWNLOADS = 2  # one that proves damaged is repeated once, for it may have been the way and not the object
_STALE_SECONDS = 3600.0  # a file that is still coming in after that was a killed process's


class Transfer:
    """Moves packets between a bucket and the cache before it, each packet once at a time.

    Args:
        bucket: has all packets.
        cache: of this machine.
        mark: of the bucket.
        pool: for transfers at the same time.
        metrics: where they are counted.

    Raises:
        StoreError: what is to be the folder of incoming packets is a link or a file.
    """

    def __init__(self, bucket: Bucket, cache: RemoteCache, mark: Mark, pool: Executor, metrics: StoreMetrics) -> None:
        self._bucket = bucket
        self._cache = cache
        self._mark = mark
        self._pool = pool
        self._metrics = metrics
        self._fetching: dict[str, Future[Packet | None]] = {}
        self._lock = Lock()
        self._room = Condition()
        self._coming_bytes = 0
        self._incoming = _own_folder(cache.folder / "incoming")
        for path in self._incoming.iterdir():
            with suppress(FileNotFoundError):
                if path.is_file() and path.lstat().st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()

    def upload(self, packet: Packet, text: str, parts: Sequence[bytes | memoryview]) -> ChunkRecord:
        """Put the packet, and then its record, where there is none.

        Raises:
            StoreError: the bucket does not take it; no record tells of it.
        """
        name = packet.packet_id
        self._mark.put()
        if self._bucket.create(packet_key(name), parts):
            self._metrics.count(puts=1, bytes_put=sum(map(len, parts)))
        record = ChunkRecord(name, packet.signature.to_json(), text, packet.num_tokens, time.time_ns())
        if not self._bucket.create(record_key(name), [record.to_json()]) and self.record(name) is None:
            self._bucket.overwrite(record_key(name), record.to_json())
        return record

    def record(self, packet_id: str) -> ChunkRecord | None:
        """What the bucket says of a packet; None where it says nothing that can be believed."""
        try:
            content = self._bucket.read(record_key(packet_id), MAX_RECORD_BYTES)
            return None if content is None else ChunkRecord.from_json(content, packet_id)
        except StoreFormatError as error:
            self._metrics.count(damaged_rows=1)
            logger.warning("%s", str(error))
            return None

    def keep(self, packet: Packet, text: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a packet that the cache knows of into it; whether there was room."""
        try:
            self._cache.keep(packet, text, parts)
        except StoreFullError as error:
            logger.info("packet %s is not kept in the cache: %s", packet.packet_id, str(error))
            return False
        return True

    def read_ahead(self, packet_ids: Iterable[str]) -> None:
        """Begin to fetch packets that are not in the cache, all at the same time."""
        for name in dict.fromkeys(packet_ids):
            if self._cache.is_there(name) and name not in self._cache:
                self._begin(name)

    def fetch(self, packet_id: str) -> Packet | None:
        """Bring a packet into the cache; the packet itself where that has no room for it.

        Raises:
            PacketNotFoundError: the bucket does not have it.
            PacketCorruptError: it is damaged there; it was moved aside.
            StoreError: it does not come.
        """
        return self._begin(packet_id).result()

    def fetched(self, packet_id: str) -> Packet | None:
        """What is on its way, once it is here; None where nothing is, or it went into the cache."""
        with self._lock:
            fetching = self._fetching.get(packet_id)
        return fetching.result() if fetching is not None else None

    def release(self, packet_ids: Iterable[str]) -> None:
        """Let go of packets that came, had no room in the cache, and are held no more."""
        with self._lock:
            for name in set(packet_ids) - self._cache.held():
                if name in self._fetching and self._fetching[name].done():
                    del self._fetching[name]

    def drop(self, packet_ids: Iterable[str]) -> None:
        """Give no more of packets that were deleted, though they be held."""
        with self._lock:
            for name in packet_ids:
                self._fetching.pop(name, None)

    def _begin(self, packet_id: str) -> Future[Packet | None]:
        with self._lock:
            fetching = self._fetching.get(packet_id)
            if fetching is not None:
                return fetching
            fetching = self._fetching[packet_id] = self._pool.submit(self._fetch, packet_id)
        fetching.add_done_callback(partial(self._settle, packet_id))
        return fetching

    def _settle(self, packet_id: str, fetching: Future[Packet | None]) -> None:
        """What lies in the cache, or did not come, need not be remembered, nor what nobody waits for any more."""
        if not (fetching.cancelled() or fetching.exception() or fetching.result() is None):
            self.release([packet_id])
            return
        with self._lock:
            if self._fetching.get(packet_id) is fetching:
                del self._fetching[packet_id]

    def _fetch(self, packet_id: str) -> Packet | None:
        row, text = self._cache.intact_row(packet_id), ""  # a row that is intact keeps its text
        if row is None:
            record = self.record(packet_id)
            if record is None:
                self._metrics.miss("unknown")
                raise PacketNotFoundError(f"packet {packet_id!r} is not in {self._bucket.url}; encode the chunk again")
            self._cache.learn([record])
            signature, text = record.signature, record.text
        else:
            signature = row.signature
        path = self._incoming / f"{packet_id}.{secrets.token_hex(8)}"
        with self._coming(packet_id):
            try:
                packet = self._download(packet_id, PacketSignature.from_json(signature), path)
                return None if self.keep(packet, text, [path.read_bytes()]) else packet
            finally:
                path.unlink(missing_ok=True)  # what is mapped stays readable

    @contextmanager
    def _coming(self, packet_id: str) -> Iterator[None]:
        """Wait until the cache has room for a packet beside all that is coming in, or it is alone in coming in.

        So the folder never takes more than its cap and one packet, which lies there twice while it is moved in.
        """
        cap = self._cache.max_bytes
        if cap is None:
            yield
            return
        size_bytes = self._bucket.size(packet_key(packet_id))
        with self._room:
            self._room.wait_for(lambda: not self._coming_bytes or self._cache.has_room(self._coming_bytes + size_bytes))
            self._coming_bytes += size_bytes
        try:
            yield
        finally:
            with self._room:
                self._coming_bytes -= size_bytes
                self._room.notify_all()

    def _download(self, packet_id: str, signature: PacketSignature, path: Path) -> Packet:
        damage: PacketCorruptError | None = None
        for _ in range(_DOWNLOADS):
            size_bytes = self._receive(packet_id, path)
            self._metrics.count(loads=1, bytes_loaded=size_bytes, verifications=1)
            try:
                return read_packet(path, packet_id, signature, verify=True)
            except PacketCorruptError as error:
                damage = error
        self._metrics.miss("damaged")
        self._cache.note_gone(packet_id)
        told = f"packet {packet_id!r} is damaged in {self._bucket.url}: {damage}"
        try:
            self._bucket.move(packet_key(packet_id), quarantine_key(packet_id))
        except StoreError as error:
            raise PacketCorruptError(f"{told}; {error}") from damage
        raise PacketCorruptError(f"{told}; it was moved to quarantine/, encode the chunk again") from damage

    def _receive(self, packet_id: str, path: Path) -> int:
        try:
            size_bytes = self._bucket.download(packet_key(packet_id), path)
            if size_bytes is None:
                self._mark.require()
        except StoreError:
            self._metrics.miss("unreadable")
            raise
        if size_bytes is None:
            self._metrics.miss("missing")
            self._cache.note_gone(packet_id)
            raise PacketNotFoundError(f"packet {packet_id!r} is gone from {self._bucket.url}; encode the chunk again")
        return size_bytes


def _own_folder(path: Path) -> Path:
    """The folder itself, made if need be: what is old in it is deleted, so it must not be another one by a link."""
    with suppress(FileExistsError):
        path.mkdir()
    if path.is_symlink() or not path.is_dir():
        raise StoreError(f"{str(path)!r} is a link or a file; expected a folder for packets on their way: remove it")
    return path
