"""Whether the rows of an index, and their vectors, are what was written."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.index_file import row_digest, vector_checksum

COLUMNS = "chunk_id, text, document_id, metadata, packet_id"
SELECT = f"SELECT {COLUMNS}, digest, seq FROM chunks"


def damaged_rows(db: sqlite3.Connection, dim: int | None) -> list[tuple[Any, ...]]:
    """Columns, digest and number of chunks of which a part, or whose vector, is not what was written."""
    vectors = db.execute("SELECT seq, vector, checksum FROM vectors NOT INDEXED")
    whole = {row[0] for row in vectors if is_whole(*row) and len(row[1]) == 4 * (dim or 0)}
    return [row for row in db.execute(f"{SELECT} NOT INDEXED") if not chunk_of(row) or row[6] not in whole]


def chunk_of(row: tuple[Any, ...]) -> Chunk | None:
    """The chunk of columns, digest and number; None if they are not what was written."""
    if not all(isinstance(column, str) for column in row[:5]) or row_digest(str(row[6]), *row[:5]) != row[5]:
        return None
    try:
        metadata = json.loads(row[3])
    except (ValueError, RecursionError):
        return None
    return Chunk(row[0], row[1], row[2], metadata) if isinstance(metadata, dict) else None


def is_whole(seq: Any, vector: Any, checksum: Any) -> bool:
    """Whether a vector is there and is the one that was written."""
    if not isinstance(seq, int) or not isinstance(vector, bytes) or not vector or len(vector) % 4:
        return False
    return bool(vector_checksum(seq, vector) == checksum)


def drop_damaged_twins(db: sqlite3.Connection) -> None:
    """Delete damaged rows and vectors that claim the key of another."""
    vectors = db.execute(f"SELECT vector_id, seq, vector, checksum FROM vectors WHERE {_is_twin('seq', 'vectors')}")
    lost = [row[:1] for row in vectors.fetchall() if not is_whole(*row[1:])]
    db.executemany("DELETE FROM vectors WHERE vector_id = ?", lost)
    chunks = db.execute(f"{SELECT} WHERE {_is_twin('chunk_id', 'chunks')}").fetchall()
    db.executemany("DELETE FROM chunks WHERE seq = ?", [row[6:] for row in chunks if not chunk_of(row)])


def strike_out(db: sqlite3.Connection, key: str) -> None:
    """Take a key out of the metadata of every chunk that is what was written."""
    for row in db.execute(f"{SELECT} NOT INDEXED").fetchall():
        chunk = chunk_of(row)
        if chunk is None or key not in chunk.metadata:
            continue
        metadata = json.dumps({name: value for name, value in chunk.metadata.items() if name != key})
        digest = row_digest(str(row[6]), *row[:3], metadata, row[4])
        db.execute("UPDATE chunks SET metadata = ?, digest = ? WHERE seq = ?", (metadata, digest, row[6]))


def _is_twin(column: str, table: str) -> str:
    """A condition: another row has the same."""
    return f"+{column} IN (SELECT +{column} FROM {table} NOT INDEXED GROUP BY +{column} HAVING COUNT(*) > 1)"
