"""The rows of an index: chunks, their vectors and packet ids. Knows nothing of FAISS."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index_file import IndexFile, row_digest, vector_checksum

_PAGE = 500  # rows read at a time where all are wanted
_COLUMNS = "chunk_id, text, document_id, metadata, packet_id"
_UPSERT = f"""INSERT INTO chunks ({_COLUMNS}, digest) VALUES (?, ?, ?, ?, ?, x'') ON CONFLICT (chunk_id) DO UPDATE SET
    text = excluded.text, document_id = excluded.document_id, metadata = excluded.metadata,
    packet_id = excluded.packet_id RETURNING seq"""
_SET_VECTOR = "INSERT OR REPLACE INTO vectors (seq, vector, checksum) VALUES (?, ?, ?)"

_STRAY = "seq NOT IN (SELECT seq FROM chunks)"  # a vector whose chunk is gone
_SELECT = f"SELECT {_COLUMNS}, digest, seq FROM chunks"

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Record = tuple[str, str, str, str, str]


class ChunkRows:
    """Chunks in the order of their first insertion, each with its vector and packet id."""

    def __init__(self, file: IndexFile) -> None:
        """Rows of an open file; its errors are raised by every method."""
        self.file = file

    def count(self) -> int:
        """Number of chunks."""
        with self.file.reading() as db:
            return int(db.execute("SELECT COUNT(*) FROM chunks").fetchone()[0])

    def dim(self) -> int | None:
        """Dimensions of the vectors, or None while there are none."""
        with self.file.reading() as db:
            rows = db.execute("SELECT seq, vector, checksum FROM vectors")
            return next((len(row[1]) // 4 for row in rows if _is_whole(*row)), None)

    def put(self, records: Sequence[Record], vectors: Vectors, gone: Sequence[str] = ()) -> None:
        """Insert or replace chunks and their vectors, and delete others; a replaced chunk keeps its place."""
        with self.file.reading() as db:
            known = "SELECT 1 FROM chunks WHERE chunk_id = ?"
            replaces = any(db.execute(known, record[:1]).fetchone() for record in records)
        with self.file.writing(erases=replaces or bool(gone)) as db:
            if (dim := self.dim()) not in (None, vectors.shape[1]):
                raise wrong_dim(self.file.name, dim, vectors.shape[1])
            for record, vector in zip(records, vectors.astype("<f4", copy=False), strict=True):
                ((seq,),) = db.execute(_UPSERT, record).fetchall()
                db.execute("UPDATE chunks SET digest = ? WHERE seq = ?", (row_digest(str(seq), *record), seq))
                content = vector.tobytes()
                db.execute(_SET_VECTOR, (seq, content, vector_checksum(seq, content)))
            _delete(db, gone)

    def delete(self, chunk_ids: Iterable[str]) -> list[str]:
        """Delete chunks and their vectors; the ids that were there, in the order given."""
        names = list(chunk_ids)
        with self.file.writing(erases=bool(names)) as db:
            return _delete(db, names)

    def update(self, column: str, values: Mapping[str, str]) -> int:
        """Set ``metadata`` or ``packet_id`` of chunks; how many there were."""
        place = _COLUMNS.split(", ").index(column)
        changed = 0
        with self.file.writing(erases=column == "metadata") as db:
            for name, value in values.items():
                row = db.execute(f"{_SELECT} WHERE chunk_id = ?", (name,)).fetchone()
                if row is not None:
                    self._chunk(row)
                    digest = row_digest(str(row[6]), *row[:place], value, *row[place + 1 : 5])
                    sql = f"UPDATE chunks SET {column} = ?, digest = ? WHERE chunk_id = ?"
                    changed += db.execute(sql, (value, digest, name)).rowcount
        return changed

    def by_chunk_id(self, chunk_id: str) -> Chunk | None:
        """The chunk of that id."""
        with self.file.reading() as db:
            row = db.execute(f"{_SELECT} WHERE chunk_id = ?", (chunk_id,)).fetchone()
            return self._chunk(row) if row else None

    def by_vector_id(self, vector_id: int) -> tuple[Chunk, str] | None:
        """The chunk of a vector and its packet id; None if either is damaged."""
        with self.file.reading() as db:
            sql = f"{_SELECT} WHERE seq = (SELECT seq FROM vectors WHERE vector_id = ?)"
            row = db.execute(sql, (vector_id,)).fetchone()
            chunk = _chunk_of(row) if row else None
            return None if chunk is None else (chunk, row[4])

    def after(self, seq: int) -> tuple[int, list[tuple[Chunk, str]]]:
        """The next rows in insertion order, and the number to ask with for those that follow."""
        with self.file.reading() as db:
            rows = db.execute(f"{_SELECT} WHERE seq > ? ORDER BY seq LIMIT {_PAGE}", (seq,)).fetchall()
            return (rows[-1][6] if rows else seq), [(self._chunk(row), row[4]) for row in rows]

    def chunk_ids(self, document_id: str, *, scan: bool = False) -> list[str]:
        """The chunks of a document, in insertion order; ``scan`` reads the whole table, past SQLite's own indexes."""
        with self.file.reading() as db:
            sql = f"SELECT chunk_id FROM chunks WHERE {'+' * scan}document_id = ? ORDER BY seq"
            return [str(row[0]) for row in db.execute(sql, (document_id,))]

    def documents(self) -> list[str]:
        """The document ids, in the order of their first chunks."""
        with self.file.reading() as db:
            sql = "SELECT document_id FROM chunks GROUP BY document_id ORDER BY MIN(seq)"
            return [str(row[0]) for row in db.execute(sql)]

    def setting(self, key: str) -> str | None:
        """A stored setting.

        Raises:
            StoreError: it is damaged.
        """
        with self.file.reading() as db:
            row = db.execute("SELECT key, value, digest FROM settings WHERE key = ?", (key,)).fetchone()
        if row and not _is_sealed(*row):
            raise self._damaged_settings([key])
        return row[1] if row else None

    def set_setting(self, key: str, value: str, *, erases: bool = False) -> None:
        """Store a setting; ``erases`` as :meth:`IndexFile.writing` has it."""
        with self.file.writing(erases=erases) as db:
            db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?, ?)", (key, value, row_digest(key, value)))

    def damaged_settings(self) -> list[str]:
        """Keys of settings that are not what was written; one whose key is damaged would pass for one never set."""
        with self.file.reading() as db:
            return [str(row[0]) for row in db.execute("SELECT * FROM settings") if not _is_sealed(*row)]

    def require_settings(self) -> None:
        """Refuse an index whose settings are damaged.

        Raises:
            StoreError: some are.
        """
        if damaged := self.damaged_settings():
            raise self._damaged_settings(damaged)

    def _damaged_settings(self, keys: Sequence[str]) -> StoreError:
        told = ", ".join(repr(key[:80]) for key in keys)
        return StoreError(
            f"index {self.file.name}: what it says of how it was built is damaged ({told}); move its folder away and "
            "ingest the documents again"
        )

    def vector(self, chunk_id: str) -> Vectors | None:
        """(dim,), the vector of a chunk."""
        with self.file.reading() as db:
            columns = "seq, vector, checksum"
            sql = f"SELECT {columns} FROM vectors WHERE seq = (SELECT seq FROM chunks WHERE chunk_id = ?)"
            row = db.execute(sql, (chunk_id,)).fetchone()
        if row and not _is_whole(*row):
            raise self._damaged_row("vector", chunk_id)
        return np.frombuffer(row[1], "<f4") if row else None

    def vector_ids(self) -> Ids:
        """(n,), ascending: the id of every vector."""
        with self.file.reading() as db:
            ids = np.array([row[0] for row in db.execute("SELECT vector_id FROM vectors")], np.int64)
            return np.sort(ids)

    def places(self, vector_ids: Ids) -> Ids:
        """(n,): where each vector's chunk stands in the order of insertion."""
        with self.file.reading() as db:
            sql = "SELECT seq FROM vectors WHERE vector_id = ?"
            rows = [db.execute(sql, (int(name),)).fetchone() for name in vector_ids]
            return np.array([row[0] if row and isinstance(row[0], int) else 0 for row in rows], np.int64)

    def vectors(self, vector_ids: Ids, dim: int) -> tuple[Ids, Vectors]:
        """(n,) and (n, dim): of ascending ids those whose vectors are whole, read in one sweep."""
        with self.file.reading() as db:
            columns = "vector_id, seq, vector, checksum"
            sql = f"SELECT {columns} FROM vectors WHERE vector_id BETWEEN ? AND ? ORDER BY vector_id"
            wanted = set(vector_ids.tolist())
            span = (int(vector_ids[0]), int(vector_ids[-1]))
            found = {row[0]: row[2] for row in db.execute(sql, span) if row[0] in wanted and _is_whole(*row[1:])}
        whole = {name: vector for name, vector in found.items() if len(vector) == 4 * dim}
        return np.array(list(whole), np.int64), np.frombuffer(b"".join(whole.values()), "<f4").reshape(-1, dim)

    def damaged(self) -> dict[str, str]:
        """Chunk and document ids of rows or vectors that are not what was written, as far as they can still be told."""
        with self.file.reading() as db:
            found = {str(row[0]): str(row[2]) for row in _damaged(db, self.dim())}
            strays = db.execute(f"SELECT vector_id FROM vectors WHERE {_STRAY}").fetchall()
        return found | {f"vector {vector_id}": "no document" for (vector_id,) in strays}

    def drop_damaged(self) -> None:
        """Delete what :meth:`damaged` tells of, whatever its ids have become."""
        with self.file.writing(erases=True) as db:
            db.executemany("DELETE FROM chunks WHERE seq = ?", [(row[6],) for row in _damaged(db, self.dim())])
            db.execute(f"DELETE FROM vectors WHERE {_STRAY}")

    def _chunk(self, row: tuple[Any, ...]) -> Chunk:
        """The chunk of a row.

        Raises:
            StoreError: the row is damaged.
        """
        chunk = _chunk_of(row)
        if chunk is None:
            raise self._damaged_row("row", row[0])
        return chunk

    def _damaged_row(self, what: str, chunk_id: object) -> StoreError:
        return StoreError(
            f"index {self.file.name}: the {what} of chunk {str(chunk_id)[:200]!r} is damaged; run 'kvpacket check DIR "
            "--repair', which takes its document out, and ingest that again"
        )


def _delete(db: sqlite3.Connection, names: Iterable[str]) -> list[str]:
    sql = "DELETE FROM chunks WHERE chunk_id = ?"
    return [name for name in names if db.execute(sql, (name,)).rowcount]


def _damaged(db: sqlite3.Connection, dim: int | None) -> list[tuple[Any, ...]]:
    """Columns, digest, number, vector and checksum of chunks of which a part is not what was written."""
    columns = ", ".join(f"chunks.{name}" for name in (*_COLUMNS.split(", "), "digest"))
    rows = db.execute(f"SELECT {columns}, seq, vector, checksum FROM chunks LEFT JOIN vectors USING (seq)")
    return [row for row in rows if not _chunk_of(row) or not _is_whole(*row[6:]) or len(row[7]) != 4 * (dim or 0)]


def _chunk_of(row: tuple[Any, ...]) -> Chunk | None:
    """The chunk of columns, digest and number; None if they are not what was written."""
    if not all(isinstance(column, str) for column in row[:5]) or row_digest(str(row[6]), *row[:5]) != row[5]:
        return None
    try:
        metadata = json.loads(row[3])
    except (ValueError, RecursionError):
        return None
    return Chunk(row[0], row[1], row[2], metadata) if isinstance(metadata, dict) else None


def _is_sealed(key: Any, value: Any, digest: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and bool(row_digest(key, value) == digest)


def _is_whole(seq: Any, vector: Any, checksum: Any) -> bool:
    """Whether a vector is there and is the one that was written."""
    if not isinstance(seq, int) or not isinstance(vector, bytes) or not vector or len(vector) % 4:
        return False
    return bool(vector_checksum(seq, vector) == checksum)


def wrong_dim(where: str, stored: int | None, given: int) -> StoreError:
    """The error of vectors that do not fit the index."""
    return StoreError(
        f"index {where} holds vectors of {stored} dimensions, but {given} were given; "
        "use the embedder that built it, or build a new index in another folder"
    )


def record(chunk: Chunk, packet_id: str) -> Record:
    """A chunk as it is stored.

    Raises:
        StoreError: naming what cannot be stored.
    """
    for what, text in (("id", chunk.chunk_id), ("text", chunk.text), ("document id", chunk.document_id)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise StoreError(
                f"chunk {chunk.chunk_id!r}: its {what} has half a surrogate pair at character {error.start}, which "
                "is no text; read the document with errors='replace'"
            ) from error
    return chunk.chunk_id, chunk.text, chunk.document_id, metadata_json(chunk.chunk_id, chunk.metadata), packet_id


def metadata_json(chunk_id: str, metadata: Mapping[str, Any]) -> str:
    """Metadata as JSON; tuples become lists.

    Raises:
        StoreError: naming the key that JSON cannot hold.
    """
    for key, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"its value cannot be written as JSON ({error})"
        else:
            if isinstance(key, str):
                continue
            reason = f"the key is of type {type(key).__name__}"
        raise StoreError(
            f"chunk {chunk_id!r}: metadata {key!r}: {reason}; use str keys, and str, number, bool, None, list or dict"
        )
    return json.dumps(dict(metadata))
