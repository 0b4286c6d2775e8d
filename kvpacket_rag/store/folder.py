"""The folder of a disk store: where each packet's file lies, written whole, set aside or swept."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvpacket_rag.database import require_plain
from kvpacket_rag.errors import StoreError, StoreFullError
from kvpacket_rag.store.packet_file import FileStamp, remedy
from kvpacket_rag.store.protocol import require_packet_id

_SHARD = re.compile(r"[0-9a-f]{2}")
_PACKET_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
CATALOGUE = "packets.sqlite"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class FolderContents:
    """What lies in the folders of a store.

    Attributes:
        packets: ids of the files where stored packets lie.
        quarantined: ids of the files set aside.
        strays: temporary files of writers at work or killed, packet files in the wrong folder, and links in place of
            folders.
    """

    packets: set[str] = field(default_factory=set)
    quarantined: set[str] = field(default_factory=set)
    strays: list[Path] = field(default_factory=list)


class StoreFolder:
    """``packets/<first 2 hex>/<packet_id>.safetensors`` and ``quarantine/<packet_id>.safetensors``.

    Nothing outside of it is read or changed: a link in place of a file or of one of its folders is not followed.
    """

    def __init__(self, root: Path) -> None:
        root = root.expanduser().absolute()  # the same folder wherever the process goes
        self.root = root
        self.packets = root / "packets"
        self.quarantine = root / "quarantine"
        try:
            root.mkdir(parents=True, exist_ok=True)
            for folder in (self.packets, self.quarantine):
                self._provide(folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"{str(root)!r} cannot be a store: {error.filename!r} is a file; name a folder") from error
        except OSError as error:
            raise StoreError(f"the store {str(root)!r} cannot be created: {error}; {remedy(error)}") from error

    def _provide(self, folder: Path) -> None:
        """Make one of its folders; where a store that is there cannot be written, one that is missing is empty."""
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            if not folder.is_symlink():
                raise
        except OSError as error:
            if error.errno not in _READ_ONLY or not (self.root / CATALOGUE).exists():
                raise
        if folder.is_symlink():
            raise StoreError(f"{str(folder)!r} is a link; a store keeps its own files, so link its whole folder")

    def catalogue(self) -> Path:
        """Where the catalogue lies.

        Raises:
            StoreError: it is no plain file; or it is gone or empty, and a new one would have the packet files beside it
                deleted.
        """
        path = self.root / CATALOGUE
        require_plain(path)
        if not _has_content(path) and self.contents().packets and not _has_content(path):
            raise StoreError(
                f"{str(path)!r} is missing or empty, though packet files lie beside it: the store is damaged. Put "
                f"the file back, or move {str(self.root)!r} away and ingest the documents again"
            )
        return path

    def path_of(self, packet_id: str) -> Path:
        """Where the packet's file lies when it is stored.

        Raises:
            PacketError: the name is no packet id; a forged row could lead anywhere.
        """
        require_packet_id(packet_id)
        return self.packets / packet_id[:2] / f"{packet_id}.safetensors"

    def _aside_path(self, packet_id: str) -> Path:
        require_packet_id(packet_id)
        return self.quarantine / f"{packet_id}.safetensors"

    def stamp(self, packet_id: str) -> FileStamp:
        """What lies where the packet's file belongs looks like from outside.

        Raises:
            FileNotFoundError: nothing is there, or only by way of a link.
        """
        path = self.path_of(packet_id)
        if path.parent.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "its folder is a link", str(path))
        return FileStamp.of(path)

    def save(self, packet_id: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a packet's file so that it is there whole or not at all, also after a power cut.

        After an error no temporary file is left; a file at the final place is the caller's to remove.

        Raises:
            StoreFullError: the disk is full.
            StoreError: it cannot be written.
        """
        target = self.path_of(packet_id)
        temporary = target.with_name(f".{packet_id}.{secrets.token_hex(8)}.tmp")
        try:
            if target.parent.is_symlink():
                target.parent.unlink()
            target.parent.mkdir(exist_ok=True)
            with open(temporary, "xb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)  # only a file can be replaced by a file
            os.replace(temporary, target)
            _sync(target.parent)
        except BaseException as error:
            _remove(temporary)
            if isinstance(error, OSError):
                raise self._write_error(packet_id, error) from error
            raise

    def holds(self, packet_id: str, stamp: FileStamp | None = None) -> bool:
        """Whether something lies where the packet's file belongs, and still has that stamp if one is given."""
        try:
            found = self.stamp(packet_id)
        except FileNotFoundError:
            return False
        return stamp is None or found == stamp

    def is_set_aside(self, packet_id: str) -> bool:
        """Whether something lies in quarantine under this id."""
        return os.path.lexists(self._aside_path(packet_id))

    def set_aside(self, packet_id: str) -> None:
        """Move a damaged file, whatever it is, out of the packets' way."""
        target = self._aside_path(packet_id)
        try:
            _remove(target)
            os.replace(self.path_of(packet_id), target)
        except OSError as error:
            raise self._write_error(packet_id, error) from error

    def remove(self, packet_id: str) -> None:
        """Delete the packet's file, stored or set aside; readers that mapped it keep their pages."""
        self.withdraw(packet_id)
        self.forget_damaged(packet_id)

    def withdraw(self, packet_id: str) -> None:
        """Delete what lies where the packet's file belongs, if anything does."""
        path = self.path_of(packet_id)
        if not path.parent.is_symlink():
            self._delete(packet_id, path)

    def forget_damaged(self, packet_id: str) -> None:
        """Delete what was set aside under this id, if anything was."""
        self._delete(packet_id, self._aside_path(packet_id))

    def contents(self) -> FolderContents:
        """What lies in the folders; files of other names are left alone.

        Raises:
            StoreError: a folder cannot be read.
        """
        found = FolderContents()
        try:
            for shard in _entries(self.packets):
                if not _SHARD.fullmatch(shard.name):
                    continue
                if shard.is_symlink():
                    found.strays.append(Path(shard.path))
                elif shard.is_dir():
                    _list(shard.path, found.packets, found.strays, shard.name)
            _list(self.quarantine, found.quarantined, found.strays)
        except OSError as error:
            raise StoreError(f"the store {str(self.root)!r} cannot be listed: {error}; {remedy(error)}") from error
        return found

    def clear(self, stray: Path) -> None:
        """Delete a stray, if it is still there."""
        self._delete(stray.name, stray)

    def _delete(self, packet_id: str, path: Path) -> None:
        try:
            _remove(path)
        except OSError as error:
            raise self._write_error(packet_id, error) from error

    def _write_error(self, packet_id: str, error: OSError) -> StoreError:
        if error.errno in _FULL:
            return StoreFullError(
                f"the disk of {str(self.root)!r} is full, packet {packet_id!r} was not written; "
                "free some room, or open the store with max_bytes"
            )
        return StoreError(
            f"the file of packet {packet_id!r} cannot be changed in {str(self.root)!r}: {error}; "
            f"{remedy(error, 'make it writable')}"
        )


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """What lies in a folder; nothing in one that is not there."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _list(folder: str | Path, packets: set[str], strays: list[Path], beginning: str = "") -> None:
    for entry in _entries(folder):
        packet_file = _PACKET_FILE.fullmatch(entry.name)
        if packet_file and entry.name.startswith(beginning):
            packets.add(packet_file.group(1))
        elif packet_file or _TEMPORARY_FILE.fullmatch(entry.name):
            strays.append(Path(entry.path))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # what unlink says of a folder, by system
        if not path.is_dir() or path.is_symlink():
            raise
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Make a rename inside the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
