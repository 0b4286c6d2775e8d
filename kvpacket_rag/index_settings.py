"""What an index says of how it was built: sealed texts under keys, beside its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpacket_rag.errors import StoreError
from kvpacket_rag.index_file import IndexFile, row_digest


class IndexSettings:
    """The settings of an open index file, whose errors every method raises."""

    def __init__(self, file: IndexFile) -> None:
        self._file = file

    def get(self, key: str) -> str | None:
        """A stored setting.

        Raises:
            StoreError: it is damaged.
        """
        with self._file.reading() as db:
            row = db.execute("SELECT key, value, digest FROM settings WHERE +key = ?", (key,)).fetchone()
        if row and not _is_sealed(*row):
            raise self._refusal([key])
        return row[1] if row else None

    def set(self, key: str, value: str, *, erases: bool = False) -> None:
        """Store a setting; ``erases`` as :meth:`IndexFile.writing` has it."""
        with self._file.writing(erases=erases) as db:
            db.execute("DELETE FROM settings WHERE +key = ?", (key,))
            db.execute("INSERT INTO settings VALUES (?, ?, ?)", (key, value, row_digest(key, value)))

    def damaged(self) -> list[str]:
        """Keys of settings that are not what was written; one whose key is damaged would pass for one never set."""
        with self._file.reading() as db:
            return [str(row[0]) for row in db.execute("SELECT * FROM settings") if not _is_sealed(*row)]

    def require(self) -> None:
        """Refuse an index whose settings are damaged.

        Raises:
            StoreError: some are.
        """
        if damaged := self.damaged():
            raise self._refusal(damaged)

    def _refusal(self, keys: Sequence[str]) -> StoreError:
        told = ", ".join(repr(key[:80]) for key in keys)
        return StoreError(
            f"index {self._file.name}: what it says of how it was built is damaged ({told}); move its folder away and "
            "ingest the documents again"
        )


def _is_sealed(key: Any, value: Any, digest: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and bool(row_digest(key, value) == digest)
