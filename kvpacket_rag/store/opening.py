"""Which store a folder or a URL is."""

from __future__ import annotations

from pathlib import Path

from kvpacket_rag.errors import StoreError
from kvpacket_rag.store.disk import DiskStore
from kvpacket_rag.store.remote import RemoteStore
from kvpacket_rag.store.remote_bucket import is_url
from kvpacket_rag.store.remote_cache import tied_to, was_never_put

KEEP_HERE = "none"  # in place of a URL: the packets stay in the folder


def open_store(
    place: Path | str, remote: str | None = None, max_bytes: int | None = None, *, sweep: bool = True
) -> DiskStore | RemoteStore:
    """The store of a folder or a URL.

    Args:
        place: the folder, or the URL.
        remote: URL of the object store that the folder is a cache of, if it is one.
        max_bytes: cap on the packets that lie in the folder.
        sweep: see :class:`~kvpacket_rag.store.DiskStore`.

    Raises:
        StoreError: the folder is the cache of an object store, without which packets put into it would be lost.
    """
    if remote:
        return RemoteStore(remote, place, max_bytes, sweep=sweep)
    if is_url(place):
        return RemoteStore(place, None, max_bytes, sweep=sweep)
    if url := tied_to(place):
        raise StoreError(
            f"the packets of {str(place)!r} lie in the object store at {url}, and the folder keeps only some of them; "
            "open it with that URL (--remote URL, remote=URL, or RemoteStore(URL, folder)), or choose another folder"
        )
    return DiskStore(place, max_bytes, sweep=sweep)


def reopen_store(
    folder: Path | str, noted: str | None, max_bytes: int | None = None, *, sweep: bool = True
) -> DiskStore | RemoteStore:
    """The store of a folder that notes a URL, which may have come from elsewhere with the folder.

    Args:
        folder: with packets.
        noted: the URL.
        max_bytes: see :func:`open_store`.
        sweep: see :class:`~kvpacket_rag.store.DiskStore`.

    Raises:
        StoreError: its packets were never uploaded there, and opening the store would do so unasked.
    """
    if noted and was_never_put(folder):
        raise StoreError(
            f"{str(folder)!r} says that its packets lie at {noted}, but they were never uploaded there; open it once "
            f"with --remote URL (remote=URL) to upload them, or with --remote {KEEP_HERE} "
            f"(remote={KEEP_HERE!r}) to keep them here"
        )
    return open_store(folder, noted, max_bytes, sweep=sweep)
