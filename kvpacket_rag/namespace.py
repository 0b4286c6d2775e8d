"""Where the index and the packets of each tenant lie, apart from those of all others."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from kvpacket_rag.errors import StoreError

FOLDER = "namespaces"
_MOST_CHARACTERS = 256
_READABLE = 24  # characters of the name that its folder shows
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # a Path makes one slash of two


def local_path(place: Path | str) -> Path:
    """A path on a disk.

    Raises:
        StoreError: it is a URL, which would become a folder of that name.
    """
    if _URL.match(str(place)):
        raise StoreError(
            f"{str(place)!r} is a URL and no path on a disk; rows and vectors lie in a folder, and packets alone may "
            "lie at a URL: give that as a string to KVPacketEngine.load(model, store='s3://bucket/packets'), and the "
            "engine to what indexes and answers"
        )
    return Path(place)


def namespace_folder(folder: Path | str, namespace: str) -> Path:
    """The folder of a namespace; ``""`` is the folder itself.

    A namespace has files of its own: rows, packets, texts and byte cap. So nothing that one tenant stores is found,
    reused, listed or evicted by another, even where their texts are equal; nor does the time to an answer tell
    whether another tenant has a text. The cost: a text that two namespaces hold is encoded and stored twice.

    Args:
        folder: of all namespaces.
        namespace: any name; no two share a folder, on no file system, and none leads out of ``folder``.

    Raises:
        StoreError: the name is longer than 256 characters, or no text; the folder is a URL; or a link stands in place
            of the namespace's folder or of the one of all namespaces.
    """
    root = local_path(folder)
    if not namespace:
        return root
    if len(namespace) > _MOST_CHARACTERS or not namespace.isprintable():
        raise StoreError(
            f"namespace {namespace[:40]!a} has {len(namespace)} characters; expected up to {_MOST_CHARACTERS}, "
            "all of them printable"
        )
    digest = hashlib.sha256(namespace.encode()).hexdigest()[:32]
    readable = re.sub(r"[^a-z0-9]+", "-", namespace.lower()).strip("-")[:_READABLE]
    found = root / FOLDER / f"{readable}-{digest}".lstrip("-")
    if str(folder):  # else it is to become part of a URL
        _require_no_link(found)
    return found


def _require_no_link(namespace: Path) -> None:
    """Whoever can write a folder that others use could lead what they store to any other place."""
    for place in (namespace.parent, namespace):
        if place.expanduser().is_symlink():
            raise StoreError(
                f"{str(place)!r} is a link, and namespaces lie in the folder itself; put a folder there, or mount one"
            )
