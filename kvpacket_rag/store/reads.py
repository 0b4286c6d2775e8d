"""What a store object remembers of its reads: which files it has verified, and what was used when."""

from __future__ import annotations

import time
from threading import Lock

from kvpacket_rag.store.packet_file import FileStamp

_YEAR_NS = 365 * 24 * 3600 * 10**9


class Reads:
    """Verified files and latest uses of one process, shared by its threads.

    A file is verified when it is first read and again whenever its stamp changed, so a warm load costs a few
    calls of lstat instead of a hash over every byte. Hashing each time would take longer than the load itself,
    which only maps the file; hashing while copying would miss that nothing is copied.

    Args:
        latest_use: the greatest one noted so far.
    """

    def __init__(self, latest_use: int) -> None:
        self._verified: dict[str, FileStamp] = {}
        self._uses: dict[str, int] = {}  # written in batches: a read must not cost a transaction
        # A clock once set years ahead, or a damaged row, must not be where counting goes on.
        self._clock = latest_use if latest_use < time.time_ns() + 10 * _YEAR_NS else 0
        self._lock = Lock()

    def is_verified(self, packet_id: str, stamp: FileStamp) -> bool:
        """Whether the file was found whole when it had that stamp."""
        return self._verified.get(packet_id) == stamp

    def verified(self, packet_id: str, stamp: FileStamp) -> None:
        """Remember a file that was found whole."""
        self._verified[packet_id] = stamp

    def used(self, packet_id: str) -> None:
        """Remember a use, to be noted in the catalogue later."""
        now = self.tick()
        with self._lock:
            self._uses[packet_id] = now

    def take_uses(self) -> dict[str, int]:
        """The uses since the last call, by packet."""
        with self._lock:
            uses, self._uses = self._uses, {}
            return uses

    def forget(self, packet_id: str) -> None:
        """Remember nothing of a packet that is gone."""
        with self._lock:
            self._verified.pop(packet_id, None)
            self._uses.pop(packet_id, None)

    def tick(self) -> int:
        """Nanoseconds that only grow, even when the system's clock goes back."""
        with self._lock:
            self._clock = max(self._clock + 1, time.time_ns())
            return self._clock
