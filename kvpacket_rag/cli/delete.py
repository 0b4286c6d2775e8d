"""``kvpacket delete``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kvpacket_rag.cli.options import add_index, require_index
from kvpacket_rag.cli.output import count, show
from kvpacket_rag.errors import StoreError

SUMMARY = "remove documents from an index"
DESCRIPTION = "Removes documents, their chunks, and the packets that no other chunk needs. Loads no model."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Documents and index."""
    parser.add_argument(
        "documents", metavar="DOCUMENT", nargs="+", help="id, path, or the end of one that no other document shares"
    )
    add_index(parser)


def run(args: argparse.Namespace) -> None:
    """Delete; nothing, if one of the documents is not there."""
    require_index(args.index)
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.journal import OwnerJournal, change_lock, remove_document
    from kvpacket_rag.ownership import finish_changes
    from kvpacket_rag.store import reopen_store

    with (
        closing(PacketIndex.open(args.index)) as index,
        closing(reopen_store(args.index, index.get_setting("remote"))) as store,
        change_lock(args.index),
    ):
        finish_changes(index, store)
        known = [*index.documents(), *OwnerJournal(index, store).documents()]
        chosen = dict.fromkeys(_document_of(name, known) for name in args.documents)
        before = store.size_bytes
        for document_id in chosen:
            chunks = remove_document(index, store, document_id)
            show(f"deleted {document_id} ({count(chunks, 'chunk')})")
        show(f"{before - store.size_bytes:,} bytes of packets freed")


def _document_of(name: str, known: Sequence[str]) -> str:
    """The document a person means.

    Raises:
        StoreError: none, or more than one.
    """
    for candidate in (name, Path(os.path.realpath(name)).as_posix()):
        if candidate in known:
            return candidate
    found = sorted({document_id for document_id in known if document_id.endswith(f"/{name}")})
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"{name!r} may be any of {', '.join(found[:5])}; name one of them in full")
    raise StoreError(f"the index holds no document {name!r}; 'kvpacket inspect DIR --documents' lists them")
