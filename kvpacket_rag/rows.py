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
_UPSERT = f"""INSERT INTO chunks ({_COLUMNS}, digest) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (chunk_id) DO UPDATE SET
    text = excluded.text, document_id = excluded.document_id, metadata = excluded.metadata,
    packet_id = excluded.packet_id, digest = excluded.digest"""
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
            row = db.execute("SELECT LENGTH(vector) FROM vectors LIMIT 1").fetchone()
            return row[0] // 4 if row else None

    def put(self, records: Sequence[Record], vectors: Vectors, gone: Sequence[str] = ()) -> None:
        """Insert or replace chunks and their vectors, and delete others; a replaced chunk keeps its place."""
        with self.file.reading() as db:
            known = "SELECT 1 FROM chunks WHERE chunk_id = ?"
            replaces = any(db.execute(known, record[:1]).fetchone() for record in records)
        with self.file.writing(erases=replaces or bool(gone)) as db:
            if (dim := self.dim()) not in (None, vectors.shape[1]):
                raise wrong_dim(self.file.name, dim, vectors.shape[1])
            for record, vector in zip(records, vectors.astype("<f4", copy=False), strict=True):
                db.execute(_UPSERT, (*record, row_digest(*record)))
                (seq,) = db.execute("SELECT seq FROM chunks WHERE chunk_id = ?", record[:1]).fetchone()
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
        with self.file.writing() as db:
            for name, value in values.items():
                row = db.execute(f"{_SELECT} WHERE chunk_id = ?", (name,)).fetchone()
                if row is not None:
                    self._chunk(row)
                    digest = row_digest(*row[:place], value, *row[place + 1 : 5])
                    sql = f"UPDATE chunks SET {column} = ?, digest = ? WHERE chunk_id = ?"
                    changed += db.execute(sql, (value, digest, name)).rowcount
        return changed

    def by_chunk_id(self, chunk_id: str) -> Chunk | None:
        """The chunk of that id."""
        with self.file.reading() as db:
            row = db.execute(f"{_SELECT} WHERE chunk_id = ?", (chunk_id,)).fetchone()
            return self._chunk(row) if row else None

    def by_vector_id(self, vector_id: int) -> tuple[Chunk, str]:
        """The chunk of a vector and its packet id."""
        with self.file.reading() as db:
            sql = f"{_SELECT} WHERE seq = (SELECT seq FROM vectors WHERE vector_id = ?)"
            row = db.execute(sql, (vector_id,)).fetchone()
            if row is None:
                raise self._damaged_vectors()
            return self._chunk(row), row[4]

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
        """A stored setting."""
        with self.file.reading() as db:
            row = db.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()
            return str(row[0]) if row else None

    def set_setting(self, key: str, value: str) -> None:
        """Store a setting."""
        with self.file.writing() as db:
            db.execute("INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)", (key, value))

    def vector(self, chunk_id: str) -> Vectors | None:
        """(dim,), the vector of a chunk."""
        with self.file.reading() as db:
            columns = "seq, vector, checksum"
            sql = f"SELECT {columns} FROM vectors WHERE seq = (SELECT seq FROM chunks WHERE chunk_id = ?)"
            row = db.execute(sql, (chunk_id,)).fetchone()
        if row and not _is_whole(*row):
            raise self._damaged_vectors()
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
            return np.array([db.execute(sql, (int(name),)).fetchone()[0] for name in vector_ids], np.int64)

    def vectors(self, vector_ids: Ids, dim: int) -> Vectors:
        """(n, dim): the vectors of ascending ids, read in one sweep.

        Raises:
            StoreError: a vector is damaged.
        """
        with self.file.reading() as db:
            columns = "vector_id, seq, vector, checksum"
            sql = f"SELECT {columns} FROM vectors WHERE vector_id BETWEEN ? AND ? ORDER BY vector_id"
            wanted = set(vector_ids.tolist())
            span = (int(vector_ids[0]), int(vector_ids[-1]))
            rows = [row[1:] for row in db.execute(sql, span) if row[0] in wanted]
        if not all(_is_whole(*row) and len(row[1]) == 4 * dim for row in rows):
            raise self._damaged_vectors()
        return np.frombuffer(b"".join(row[1] for row in rows), "<f4").reshape(-1, dim)

    def _damaged_vectors(self) -> StoreError:
        return StoreError(
            f"index {self.file.name} holds damaged vectors; run 'kvpacket check DIR --repair', which takes their "
            "documents out, and ingest those again"
        )

    def damaged(self) -> dict[str, str]:
        """Chunk and document ids of rows or vectors that are not what was written, as far as they can still be told."""
        with self.file.reading() as db:
            found = {str(row[0]): str(row[2]) for row in _damaged(db)}
            strays = db.execute(f"SELECT vector_id FROM vectors WHERE {_STRAY}").fetchall()
        return found | {f"vector {vector_id}": "no document" for (vector_id,) in strays}

    def drop_damaged(self) -> None:
        """Delete what :meth:`damaged` tells of, whatever its ids have become."""
        with self.file.writing(erases=True) as db:
            db.executemany("DELETE FROM chunks WHERE seq = ?", [(row[6],) for row in _damaged(db)])
            db.execute(f"DELETE FROM vectors WHERE {_STRAY}")

    def _chunk(self, row: tuple[Any, ...]) -> Chunk:
        """The chunk of a row.

        Raises:
            StoreError: the row is damaged.
        """
        if not _is_intact(row):
            raise StoreError(
                f"index {self.file.name}: the row of chunk {str(row[0])[:200]!r} is damaged; run 'kvpacket check DIR "
                "--repair', which takes its document out, and ingest that again"
            )
        return Chunk(row[0], row[1], row[2], json.loads(row[3]))


def _delete(db: sqlite3.Connection, names: Iterable[str]) -> list[str]:
    sql = "DELETE FROM chunks WHERE chunk_id = ?"
    return [name for name in names if db.execute(sql, (name,)).rowcount]


def _damaged(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Columns, digest, number, vector and checksum of chunks of which a part is not what was written."""
    columns = ", ".join(f"chunks.{name}" for name in (*_COLUMNS.split(", "), "digest"))
    rows = db.execute(f"SELECT {columns}, seq, vector, checksum FROM chunks LEFT JOIN vectors USING (seq)")
    return [row for row in rows if not _is_intact(row) or not _is_whole(*row[6:])]


def _is_intact(row: tuple[Any, ...]) -> bool:
    return all(isinstance(column, str) for column in row[:5]) and row_digest(*row[:5]) == row[5]


def _is_whole(seq: Any, vector: Any, checksum: Any) -> bool:
    """Whether a vector is there and is the one that was written."""
    return isinstance(seq, int) and isinstance(vector, bytes) and vector_checksum(seq, vector) == checksum


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
