"""An object that tells an object store whose packets were all deleted from an empty folder in its place."""

from __future__ import annotations

import logging

from kvpacket_rag.errors import StoreError
from kvpacket_rag.store.remote_bucket import Bucket
from kvpacket_rag.store.remote_cache import RemoteCache

logger = logging.getLogger(__name__)

MARK = "kvpacket-rag"  # lies beside the folders of packets and records, in none of them
_CONTENT = (
    b"Packets of kvpacket-rag lie here, or did. Without this file, what machines keep of them would be refused.\n"
)


class Mark:
    """The mark of a bucket: put with the first packet, and anew where packets lie without one.

    A share that is not mounted answers, and is empty; what it answers must not be taken for deletions.

    Args:
        bucket: of the packets.
        cache: before it; remembers that there was a mark.
        may_write: whether a mark may be put.
    """

    def __init__(self, bucket: Bucket, cache: RemoteCache, may_write: bool = True) -> None:
        self._bucket = bucket
        self._cache = cache
        self._may_write = may_write
        self._was_seen = False  # by this process

    def put(self) -> None:
        """Put the mark, unless it was seen; where that is not allowed, there is none."""
        if self._was_seen:
            return
        if not self._bucket.size(MARK):
            if not self._may_write:
                return
            try:
                self._bucket.create(MARK, [_CONTENT])
            except StoreError as error:
                self._may_write = False
                logger.debug("the object store is not marked: %s", str(error))
                return
        self._note()

    def require(self, is_empty: bool = False) -> None:
        """See that what the bucket lacks was deleted.

        Args:
            is_empty: whether it lists no packet at all.

        Raises:
            StoreError: the mark is gone, or there never was one and the bucket is empty.
        """
        if self._bucket.size(MARK):
            self._note()
        elif is_empty or self._cache.saw_mark:
            raise StoreError(
                f"the object store at {self._bucket.url} is empty, or not the one into which the packets were put: a "
                "share may not be mounted, so mount it; or, if it was emptied on purpose, delete packets.sqlite* and "
                f"the folder packets in {str(self._cache.folder)!r}"
            )

    def _note(self) -> None:
        self._was_seen = True
        if not (self._cache.saw_mark or self._cache.is_read_only):
            self._cache.note_mark()
