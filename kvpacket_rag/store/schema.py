"""The tables of a catalogue, their format version, and how those of an earlier one become those of this one."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kvpacket_rag import database
from kvpacket_rag.errors import StoreFormatError

STORE_VERSION = 3
DAMAGED_OWNER = (  # a condition, with create_functions()
    "typeof(packet_id) || typeof(owner) != 'texttext' "
    "OR digest IS NOT seal(CAST(packet_id AS BLOB), CAST(owner AS BLOB))"
)

# The triggers keep counts, bytes and revision right whichever process changes a row, so that
# reading them costs one row and not a scan.
_SCRIPT = f"""
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
    digest BLOB NOT NULL
);
CREATE INDEX packets_by_use ON packets (state, last_used);
CREATE TABLE owners (packet_id TEXT NOT NULL, owner TEXT NOT NULL, digest BLOB NOT NULL,
    PRIMARY KEY (packet_id, owner)) WITHOUT ROWID;
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


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


_SCHEMA = tuple(_statements(_SCRIPT))  # one by one: executescript() would commit the open transaction


def row_digest(packet_id: str, signature: str, text: str, num_tokens: object) -> bytes:
    """16 bytes over what a row says of its packet: SQLite does not notice a bit that flips inside a text.

    A text that is not the one the packet was made from would be found in prompts and answered from the
    wrong packet, so no row is believed whose digest does not match.
    """
    return _seal(packet_id, signature, str(num_tokens), text)


def owner_digest(packet_id: str, owner: str) -> bytes:
    """16 bytes over who owns what: a packet whose owner's name is damaged would outlive the owner."""
    return _seal(packet_id, owner)


def _seal(*parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def _seal_blobs(*parts: object) -> bytes:
    """For SQL; of a NULL, which only damage leaves, the digest is none that matches."""
    texts = [part.decode(errors="replace") for part in parts if isinstance(part, bytes)]
    return _seal(*texts) if len(texts) == len(parts) else b""


def create_functions(connection: sqlite3.Connection) -> None:
    """``seal`` for SQL, of parts as blobs."""
    connection.create_function("seal", -1, _seal_blobs)


def damaged_owners(connection: sqlite3.Connection) -> list[str]:
    """The packets of owners whose names are not what was written."""
    create_functions(connection)
    return [str(row[0]) for row in connection.execute(f"SELECT packet_id FROM owners WHERE {DAMAGED_OWNER}")]


def rows_are_whole(connection: sqlite3.Connection) -> bool:
    """Whether every row says what was written."""
    rows = connection.execute("SELECT packet_id, signature, text, num_tokens, digest FROM packets NOT INDEXED")
    sealed = all(all(isinstance(c, str) for c in row[:3]) and row_digest(*row[:4]) == row[4] for row in rows)
    return sealed and not damaged_owners(connection)


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables, or bring those of an earlier version up to date, all or nothing.

    Raises:
        StoreFormatError: another program or a version not known here wrote the file; it was not changed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = written_version(connection, path)  # another process may have been quicker
        if version is None:
            for statement in _SCHEMA:
                connection.execute(statement)
        elif version < STORE_VERSION:
            _migrate(connection, version)
            written_version(connection, path)
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
    version = known[row[0]]
    database.require_objects(connection, repr(str(path)), _SCHEMA, is_current=version == STORE_VERSION)
    return version


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse to write rows of this format into a catalogue that another version has brought up to date meanwhile.

    Raises:
        StoreFormatError: one has.
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    if row and row[0] != str(STORE_VERSION):
        raise StoreFormatError(
            f"the packet store {str(path)!r} was brought to format {row[0]} by another version of kvpacket-rag while "
            f"it was open here in format {STORE_VERSION}; close it and open it again with that version"
        )


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """Rows had no digest, and owners none in version 2: what they say is believed once more, and sealed."""
    create_functions(connection)
    tables = {1: ("packets", ("packet_id", "signature", "num_tokens", "text")), 2: ("owners", ("packet_id", "owner"))}
    for earlier in range(version, STORE_VERSION):
        table, columns = tables[earlier]
        sealed = ", ".join(f"CAST({column} AS BLOB)" for column in columns)
        connection.execute(f"ALTER TABLE {table} ADD COLUMN digest BLOB NOT NULL DEFAULT x''")
        connection.execute(f"UPDATE {table} SET digest = seal({sealed})")
    database.drop_defaults(connection)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'format_version'", (str(STORE_VERSION),))
