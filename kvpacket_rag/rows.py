"""The rows of an index: chunks, their vectors and packet ids. Knows nothing of FAISS."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index_file import IndexFile, row_digest, vector_checksum
from kvpacket_rag.row_checks import COLUMNS, SELECT, chunk_of, damaged_rows, drop_damaged_twins, is_whole, strike_out

logger = logging.getLogger(__name__)

_PAGE = 500  # rows read at a time where all are wanted
_UPSERT = f"""INSERT INTO chunks (seq, {COLUMNS}, digest) VALUES (?, ?, ?, ?, ?, ?, x'')
    ON CONFLICT (seq) DO UPDATE SET text = excluded.text, document_id = excluded.document_id,
    metadata = excluded.metadata, packet_id = excluded.packet_id RETURNING seq"""
_DROP_VECTOR = "DELETE FROM vectors WHERE vector_id = (SELECT vector_id FROM vectors WHERE seq = ?1) AND +seq = ?1"
_SET_VECTOR = "INSERT INTO vectors (seq, vector, checksum) VALUES (?, ?, ?)"

_STRAY = "vectors NOT INDEXED WHERE seq NOT IN (SELECT seq FROM chunks)"  # vectors whose chunks are gone

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
            return next((len(row[1]) // 4 for row in rows if is_whole(*row)), None)

    def put(self, records: Sequence[Record], vectors: Vectors, gone: Sequence[str] = ()) -> None:
        """Insert or replace chunks and their vectors, and delete others; a replaced chunk keeps its place."""
        with self.file.reading():
            replaces = any(self._row(record[0]) for record in records)
        with self._changing(erases=replaces or bool(gone)) as db:
            if (dim := self.dim()) not in (None, vectors.shape[1]):
                raise wrong_dim(self.file.name, dim, vectors.shape[1])
            for record, vector in zip(records, vectors.astype("<f4", copy=False), strict=True):
                known = self._row(record[0])
                ((seq,),) = db.execute(_UPSERT, (known[6] if known else None, *record)).fetchall()
                db.execute("UPDATE chunks SET digest = ? WHERE seq = ?", (row_digest(str(seq), *record), seq))
                content = vector.tobytes()
                db.execute(_DROP_VECTOR, (seq,))
                db.execute(_SET_VECTOR, (seq, content, vector_checksum(seq, content)))
            self._delete(db, gone)

    def delete(self, chunk_ids: Iterable[str]) -> list[str]:
        """Delete chunks and their vectors; the ids that were there, in the order given."""
        names = list(chunk_ids)
        with self._changing(erases=bool(names)) as db:
            return self._delete(db, names)

    def update(self, column: str, values: Mapping[str, str]) -> int:
        """Set ``metadata`` or ``packet_id`` of chunks; how many there were."""
        place = COLUMNS.split(", ").index(column)
        changed = 0
        with self._changing(erases=column == "metadata") as db:
            for name, value in values.items():
                row = self._row(name)
                if row is not None:
                    self._chunk(row)
                    digest = row_digest(str(row[6]), *row[:place], value, *row[place + 1 : 5])
                    sql = f"UPDATE chunks SET {column} = ?, digest = ? WHERE seq = ?"
                    changed += db.execute(sql, (value, digest, row[6])).rowcount
        return changed

    def by_chunk_id(self, chunk_id: str) -> Chunk | None:
        """The chunk of that id."""
        with self.file.reading():
            row = self._row(chunk_id)
            return self._chunk(row) if row else None

    def by_vector_id(self, vector_id: int) -> tuple[Chunk, str] | None:
        """The chunk of a vector and its packet id; None if either is damaged."""
        with self.file.reading() as db:
            sql = f"{SELECT} WHERE seq = (SELECT seq FROM vectors WHERE vector_id = ?)"
            row = db.execute(sql, (vector_id,)).fetchone()
            chunk = chunk_of(row) if row else None
            return None if chunk is None else (chunk, row[4])

    def after(self, seq: int) -> tuple[int, list[tuple[Chunk, str]]]:
        """The next rows in insertion order, and the number to ask with for those that follow."""
        with self.file.reading() as db:
            rows = db.execute(f"{SELECT} WHERE seq > ? ORDER BY seq LIMIT {_PAGE}", (seq,)).fetchall()
            return (rows[-1][6] if rows else seq), [(self._chunk(row), row[4]) for row in rows]

    def chunk_ids(self, document_id: str) -> list[str]:
        """The chunks of a document, in insertion order."""
        with self.file.reading() as db:
            past_index = "" if self.file.is_sound() else "+"
            sql = f"SELECT chunk_id FROM chunks WHERE {past_index}document_id = ? ORDER BY seq"
            return [str(row[0]) for row in db.execute(sql, (document_id,))]

    def documents(self) -> list[str]:
        """The document ids, in the order of their first chunks."""
        with self.file.reading() as db:
            sql = "SELECT document_id FROM chunks GROUP BY document_id ORDER BY MIN(seq)"
            return [str(row[0]) for row in db.execute(sql)]

    def vector(self, chunk_id: str) -> Vectors | None:
        """(dim,), the vector of a chunk."""
        with self.file.reading() as db:
            columns = "seq, vector, checksum"
            chunk = self._row(chunk_id)
            past_index = "" if self.file.is_sound() else "+"
            sql = f"SELECT {columns} FROM vectors WHERE {past_index}seq = ?"
            row = db.execute(sql, chunk[6:]).fetchone() if chunk else None
        if row and not is_whole(*row):
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
            found = {row[0]: row[2] for row in db.execute(sql, span) if row[0] in wanted and is_whole(*row[1:])}
        whole = {name: vector for name, vector in found.items() if len(vector) == 4 * dim}
        return np.array(list(whole), np.int64), np.frombuffer(b"".join(whole.values()), "<f4").reshape(-1, dim)

    def damaged(self) -> dict[str, str]:
        """Chunk and document ids of rows or vectors that are not what was written, as far as they can still be told."""
        with self.file.reading() as db:
            found = {str(row[0]): str(row[2]) for row in damaged_rows(db, self.dim())}
            strays = db.execute(f"SELECT vector_id FROM {_STRAY}").fetchall()
        return found | {f"vector {vector_id}": "no document" for (vector_id,) in strays}

    def drop_damaged(self) -> None:
        """Delete what :meth:`damaged` tells of, whatever its ids have become."""
        with self.file.writing(erases=True) as db:
            db.executemany("DELETE FROM chunks WHERE seq = ?", [(row[6],) for row in damaged_rows(db, self.dim())])
            db.execute(f"DELETE FROM {_STRAY}")

    def mend(self, mark: str) -> None:
        """Make SQLite's indexes anew. Of rows that claim one key, damaged ones go; so they do not stand in the way.

        Where rows are lost or will be, this metadata key goes from all others in the same step.
        """
        is_intact = not self.file.faults() and not self.damaged()
        with self.file.writing(erases=True) as db:
            self.file.reindex(however_damaged=True)
            drop_damaged_twins(db)
            if not is_intact:
                strike_out(db, mark)

    @contextmanager
    def _changing(self, *, erases: bool) -> Iterator[sqlite3.Connection]:
        """A transaction in which SQLite's indexes lead to the rows of their tables.

        Raises:
            StoreError: they do not, and rows are damaged too: either may be what was written.
        """
        with self.file.writing(erases=erases) as db:
            if not self.file.is_sound():
                if damaged_rows(db, self.dim()):
                    raise StoreError(
                        f"index {self.file.name}: rows and the ways to them are damaged, so nothing was changed; run "
                        "'kvpacket check DIR --repair', which takes damaged documents out, and ingest these again"
                    )
                logger.warning("index %s: SQLite's indexes are damaged, and made anew from the rows", self.file.name)
                self.file.reindex()
            yield db

    def _row(self, chunk_id: str) -> tuple[Any, ...] | None:
        """Columns, digest and number of a chunk: SQLite's index is believed if the table has that chunk there."""
        with self.file.reading() as db:
            sql = f"{SELECT} WHERE seq = (SELECT seq FROM chunks WHERE chunk_id = ?1) AND +chunk_id = ?1"
            row: tuple[Any, ...] | None = db.execute(sql, (chunk_id,)).fetchone()
            if row is None and not self.file.is_sound():
                row = db.execute(f"{SELECT} WHERE +chunk_id = ?", (chunk_id,)).fetchone()
            return row

    def _delete(self, db: sqlite3.Connection, names: Iterable[str]) -> list[str]:
        rows = {name: self._row(name) for name in names}
        sql = "DELETE FROM chunks WHERE seq = ?"
        return [name for name, row in rows.items() if row and db.execute(sql, row[6:]).rowcount]

    def _chunk(self, row: tuple[Any, ...]) -> Chunk:
        """The chunk of a row.

        Raises:
            StoreError: the row is damaged.
        """
        chunk = chunk_of(row)
        if chunk is None:
            raise self._damaged_row("row", row[0])
        return chunk

    def _damaged_row(self, what: str, chunk_id: object) -> StoreError:
        return StoreError(
            f"index {self.file.name}: the {what} of chunk {str(chunk_id)[:200]!r} is damaged; run 'kvpacket check DIR "
            "--repair', which takes its document out, and ingest that again"
        )


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
