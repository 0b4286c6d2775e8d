"""The tables of a catalogue, their format version, and how those of an earlier one become those of this one."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kvpacket_rag.errors import StoreFormatError

STORE_VERSION = 2

# The triggers keep counts, bytes and revision right whichever process changes a row, so that
# reading them costs one row and not a scan.
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('format_version', '{STORE_VERSION}');
CREATE TABLE packets (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    packet_id TEXT NOT NULL UNIQUE,
    signature TEXT NOT NULL,
    text TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('stored', 'evicted', 'quarantined')),
    reason TEXT NOT NULL DEFAULT '',
    last_used INTEGER NOT NULL,
    digest BLOB NOT NULL DEFAULT x''
);
CREATE INDEX packets_by_use ON packets (state, last_used);
CREATE TABLE owners (packet_id TEXT NOT NULL, owner TEXT NOT NULL, PRIMARY KEY (packet_id, owner)) WITHOUT ROWID;
CREATE INDEX owners_by_owner ON owners (owner);
CREATE TABLE totals (stored INTEGER NOT NULL, size_bytes INTEGER NOT NULL, revision INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
CREATE TRIGGER count_new AFTER INSERT ON packets BEGIN
    UPDATE totals SET stored = stored + (NEW.state = 'stored'), size_bytes = size_bytes + NEW.size_bytes,
        revision = revision + 1;
END;
CREATE TRIGGER count_gone AFTER DELETE ON packets BEGIN
    UPDATE totals SET stored = stored - (OLD.state = 'stored'), size_bytes = size_bytes - OLD.size_bytes,
        revision = revision + 1;
END;
CREATE TRIGGER count_changed AFTER UPDATE OF state, size_bytes ON packets BEGIN
    UPDATE totals SET stored = stored + (NEW.state = 'stored') - (OLD.state = 'stored'),
        size_bytes = size_bytes + NEW.size_bytes - OLD.size_bytes;
END;
"""


def row_digest(packet_id: str, signature: str, text: str, num_tokens: object) -> bytes:
    """16 bytes over what a row says of its packet: SQLite does not notice a bit that flips inside a text.

    A text that is not the one the packet was made from would be found in prompts and answered from the
    wrong packet, so no row is believed whose digest does not match.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (packet_id, signature, str(num_tokens), text):
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables, or bring those of an earlier version up to date, all or nothing.

    Raises:
        StoreFormatError: another program or a version not known here wrote the file; it was not changed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = written_version(connection, path)  # another process may have been quicker
        if version is None:
            for statement in _statements(_SCHEMA):
                connection.execute(statement)
        elif version < STORE_VERSION:
            _from_version_1(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def written_version(connection: sqlite3.Connection, path: Path) -> int | None:
    """The format version of a catalogue, or None of an empty file.

    Raises:
        StoreFormatError: it is no catalogue, or one of a version that cannot be read here.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if not {"meta", "packets", "owners", "totals"} <= tables:
        raise StoreFormatError(f"{str(path)!r} is a database, but no packet store; name another folder")
    row = connection.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    known = {str(version): version for version in range(1, STORE_VERSION + 1)}
    if row is None or row[0] not in known:
        raise StoreFormatError(
            f"the packet store {str(path)!r} has format version {row[0] if row else 'none'}, expected "
            f"{STORE_VERSION} or an earlier one; use the version of kvpacket-rag that wrote it, or ingest the "
            "documents into a new folder"
        )
    return known[row[0]]


def _from_version_1(connection: sqlite3.Connection) -> None:
    """Rows had no digest: what they say is believed once more, and sealed."""
    connection.execute("ALTER TABLE packets ADD COLUMN digest BLOB NOT NULL DEFAULT x''")
    connection.create_function("row_digest", 4, row_digest, deterministic=True)
    connection.execute("UPDATE packets SET digest = row_digest(packet_id, signature, text, num_tokens)")
    connection.execute("UPDATE meta SET value = ? WHERE key = 'format_version'", (str(STORE_VERSION),))


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: executescript() would commit the open transaction."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
