"""Which chunks may own packets without having a row, told to the index before it comes to that.

Rows and packets lie in two databases, so no transaction spans both. A process killed between the two
would leave packets that no row names and nobody can delete; what it was about is therefore written down first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Self

from filelock import FileLock

from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.owners import owner_names
from kvpacket_rag.store import PacketStore

_SETTING = "unsettled"
_DELETING = "deleting"  # documents whose rows go too


class ChangeLock(FileLock):
    """A file that one process at a time holds; the system lets go of it when that process ends, however it ends."""

    def __enter__(self) -> Self:
        """Wait for it.

        Raises:
            StoreError: the folder cannot be written, or its file system has no locks.
        """
        try:
            return super().__enter__()
        except (NotImplementedError, OSError) as error:
            raise StoreError(
                f"{self.lock_file!r} cannot be locked ({error}); make its folder writable, and use a local disk or a "
                "network disk with locks"
            ) from error


def change_lock(folder: str | Path) -> ChangeLock:
    """To be held while an index in a folder is changed, so that processes take turns; reading needs no lock.

    On a network disk it reaches as far as the disk's own locks do: NFS 4 and SMB carry them to other machines, sshfs
    does not. Two machines may not use one folder at once in any case, see :class:`~kvpacket_rag.store.DiskStore`.
    """
    return ChangeLock(Path(folder) / ".changing.lock")


class OwnerJournal:
    """Chunk ids by document, kept with an index until rows and packets agree again.

    Args:
        index: keeps the journal and says which chunks have a row.
        store: whose packets the chunks own.
    """

    def __init__(self, index: PacketIndex, store: PacketStore) -> None:
        self._index = index
        self._store = store

    def documents(self) -> list[str]:
        """Those that are not settled."""
        return list(self._read())

    def chunk_ids(self) -> list[str]:
        """Those that may own packets without having a row."""
        return [chunk_id for chunk_ids in self._read().values() for chunk_id in chunk_ids]

    def note(self, chunk_ids: Mapping[str, Iterable[str]]) -> None:
        """Chunks whose rows or packets are about to come or go, by document."""
        noted = self._read()
        merged = {name: list(dict.fromkeys([*noted.get(name, ()), *ids])) for name, ids in chunk_ids.items()}
        self._write(noted | merged)

    def delete(self, document_id: str, chunk_ids: Sequence[str]) -> None:
        """Remove a document's rows and packets; cut short, :meth:`finish_deletions` goes on with it."""
        self.note({document_id: chunk_ids})
        self._write({**self._read(_DELETING), document_id: []}, _DELETING)
        self.settle([document_id])

    def finish_deletions(self, lock: AbstractContextManager[object] | None = None) -> None:
        """Bring deletions that were cut short to their end.

        Args:
            lock: to be held meanwhile; not taken where there is nothing to do.
        """
        if self._read(_DELETING):
            with lock or nullcontext():
                self.settle(self._read(_DELETING))

    def settle(self, document_ids: Iterable[str]) -> None:
        """Release the packets of noted chunks that have no row, and strike the documents out."""
        noted = self._read()
        done = [name for name in document_ids if name in noted]
        if not done:
            return
        deletions = self._read(_DELETING).keys() & set(done)
        self._index.delete([chunk_id for name in deletions for chunk_id in noted[name]])
        present = {chunk_id for name in done for chunk_id in self._index.chunk_ids(name)}
        gone = [chunk_id for name in done for chunk_id in noted[name] if chunk_id not in present]
        self._store.drop_owners(owner_names(self._index, self._store, gone))
        if deletions:
            self._write({name: [] for name in self._read(_DELETING) if name not in deletions}, _DELETING)
        # last of all, for it empties the log of the names that the steps before have written
        self._write({name: ids for name, ids in noted.items() if name not in done}, erases=bool(gone))

    def _read(self, key: str = _SETTING) -> dict[str, list[str]]:
        try:
            noted: dict[str, list[str]] = json.loads(self._index.get_setting(key) or "{}")
            if not all(isinstance(ids, list) and all(isinstance(one, str) for one in ids) for ids in noted.values()):
                raise ValueError("no lists of ids")
        except (ValueError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"the journal of the index is damaged ({error}); move the folder away and ingest the documents again"
            ) from error
        return noted

    def _write(self, noted: Mapping[str, list[str]], key: str = _SETTING, *, erases: bool = False) -> None:
        self._index.set_setting(key, json.dumps(noted), erases=erases)


def remove_document(index: PacketIndex, store: PacketStore, document_id: str) -> int:
    """Remove a document, its rows, and the packets no other chunk refers to. Needs no model.

    Returns:
        How many chunks went.

    Raises:
        StoreError: no such document, or the index is too damaged to delete it.
    """
    journal = OwnerJournal(index, store)
    chunk_ids = index.chunk_ids(document_id)
    if not chunk_ids and document_id not in journal.documents():
        raise StoreError(f"the index holds no document {document_id!r}; 'kvpacket inspect --documents' lists them")
    journal.finish_deletions()
    journal.delete(document_id, chunk_ids)
    if index.chunk_ids(document_id):
        raise StoreError(
            f"rows of document {document_id!r} could not be deleted, for the index is damaged; run 'kvpacket check "
            "--repair' and delete it again"
        )
    return len(chunk_ids)
