"""What is wrong with the structure of a SQLite file, and its indexes made anew."""

from __future__ import annotations

import sqlite3


def faults(connection: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong with a file's structure, and with its own indexes of the tables; reads all of it."""
    try:
        return [str(line) for (line,) in connection.execute("PRAGMA integrity_check(20)") if line != "ok"]
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        return [str(error)]


def rebuild_indexes(connection: sqlite3.Connection) -> None:
    """Make SQLite's indexes anew from the tables, however damaged; ``database.compact`` frees the room of the former.

    ``REINDEX`` and ``DROP`` walk through what was there, and fail where that leads nowhere. So each index gets the tree
    of another one over the same columns, which is in every respect what its own would be.
    """
    indexes = connection.execute("SELECT name, tbl_name FROM sqlite_master WHERE type = 'index'").fetchall()
    root = "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master WHERE name = ?) WHERE name = ?"
    connection.execute("PRAGMA writable_schema = ON")
    try:
        for number, (name, table) in enumerate(indexes):
            columns = ", ".join(column for *_, column in connection.execute(f"PRAGMA index_info({name})"))
            connection.execute(f"CREATE INDEX anew_{number} ON {table} ({columns})")
            connection.execute(root, (f"anew_{number}", name))
            connection.execute("DELETE FROM sqlite_master WHERE name = ?", (f"anew_{number}",))
        (version,) = connection.execute("PRAGMA schema_version").fetchone()
        connection.execute(f"PRAGMA schema_version = {version + 1}")  # other processes read it again
    finally:
        connection.execute("PRAGMA writable_schema = RESET")  # so does this one
