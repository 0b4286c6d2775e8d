"""The folder of a disk store: where each packet's file lies, written whole, set aside or swept."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Container, Iterable
from pathlib import Path

from kvpacket_rag.errors import StoreError, StoreFullError
from kvpacket_rag.store.packet_file import FileStamp

SWEEP_AGE_SECONDS = 3600.0  # no write takes this long, so an older leftover belongs to a process that was killed

_SHARD = re.compile(r"[0-9a-f]{2}")
_PACKET_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreFolder:
    """``packets/<first 2 hex>/<packet_id>.safetensors`` and ``quarantine/<packet_id>.safetensors``."""

    def __init__(self, root: Path) -> None:
        root = root.expanduser().absolute()  # the same folder wherever the process goes
        self.root = root
        self.packets = root / "packets"
        self.quarantine = root / "quarantine"
        try:
            for folder in (root, self.packets, self.quarantine):
                folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"{str(root)!r} cannot be a store: {error.filename!r} is a file; name a folder") from error
        except OSError as error:
            raise StoreError(f"the store {str(root)!r} cannot be created: {error}; check the permissions") from error

    def path_of(self, packet_id: str) -> Path:
        """Where the packet's file lies when it is stored."""
        return self.packets / packet_id[:2] / f"{packet_id}.safetensors"

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
            found = FileStamp.of(self.path_of(packet_id))
        except FileNotFoundError:
            return False
        return stamp is None or found == stamp

    def set_aside(self, packet_id: str) -> None:
        """Move a damaged file, whatever it is, out of the packets' way."""
        target = self.quarantine / f"{packet_id}.safetensors"
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
        self._delete(packet_id, self.path_of(packet_id))

    def forget_damaged(self, packet_id: str) -> None:
        """Delete what was set aside under this id, if anything was."""
        self._delete(packet_id, self.quarantine / f"{packet_id}.safetensors")

    def sweep(self, stored: Container[str], quarantined: Container[str]) -> int:
        """Delete what killed processes left: old temporary files and files no row speaks of; returns how many.

        Raises:
            StoreError: a folder cannot be read or a leftover cannot be deleted.
        """
        try:
            shards = [entry for entry in os.scandir(self.packets) if _SHARD.fullmatch(entry.name)]
            swept = sum(_sweep(shard.path, stored) for shard in shards if shard.is_dir(follow_symlinks=False))
            return swept + _sweep(str(self.quarantine), quarantined)
        except OSError as error:
            raise StoreError(f"the store {str(self.root)!r} cannot be swept: {error}; check the permissions") from error

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
        return StoreError(f"the file of packet {packet_id!r} cannot be changed in {str(self.root)!r}: {error}")


def _sweep(folder: str, keep: Container[str]) -> int:
    swept = 0
    for entry in os.scandir(folder):
        packet_file = _PACKET_FILE.fullmatch(entry.name)
        orphan = packet_file.group(1) not in keep if packet_file else _TEMPORARY_FILE.fullmatch(entry.name)
        if not orphan:
            continue
        try:
            age_seconds = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if age_seconds > SWEEP_AGE_SECONDS:
                _remove(Path(entry.path))
                swept += 1
        except FileNotFoundError:  # another process sweeps as well
            continue
    return swept


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
