"""Where a persisted vector store lies: a small file for LlamaIndex's storage folder, and the folder it points to."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from kvpacket_rag import DiskStore, KVPacketEngine, PacketError, PacketIndex, StoreError, StoreFormatError

# No JSON on purpose: LlamaIndex opens what it finds in a storage folder as a SimpleVectorStore, and would read any
# JSON object as an empty one without a word.
_HEADER = "kvpacket-rag vector store, format 1: open it with KVPacketVectorStore.from_persist_dir"


def require_local(fs: Any) -> None:
    """Refuse remote file systems: packets are mapped into memory.

    Raises:
        StoreError: ``fs`` is one.
    """
    if fs is not None and not isinstance(fs, LocalFileSystem):
        raise StoreError(f"packets cannot be kept on {type(fs).__name__}; persist to a local disk and leave fs out")


def write_pointer(pointer: Path, folder: Path) -> None:
    """Note where a store lies, in one step; relative if it lies beside the note, so that both can be moved."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    inside = folder.resolve().is_relative_to(pointer.parent.resolve())
    place = os.path.relpath(folder, pointer.parent) if inside else str(folder.resolve())
    with tempfile.NamedTemporaryFile("w", dir=pointer.parent, delete=False, encoding="utf-8") as file:
        file.write(f"{_HEADER}\n{json.dumps({'folder': place})}\n")
    os.replace(file.name, pointer)


def read_pointer(pointer: Path) -> Path:
    """The folder that a note names.

    Raises:
        StoreError: there is no such file.
        StoreFormatError: it is no note of this format.
    """
    try:
        header, _, rest = pointer.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{pointer} cannot be read as a persisted vector store: {error}; persist one there") from error
    if header != _HEADER:
        raise StoreFormatError(f"{pointer} begins {header[:60]!r}, expected {_HEADER!r}; another store wrote it")
    return pointer.parent / str(json.loads(rest)["folder"])


def copy_index(index: PacketIndex, folder: Path) -> None:
    """Bring the index in a folder to what ``index`` holds: first what is new, then what is gone."""
    copy = PacketIndex.open(folder)
    try:
        rows = list(index.rows())
        names = [chunk.chunk_id for chunk, _ in rows]
        copy.add([chunk for chunk, _ in rows], index.vectors(names), [packet for _, packet in rows])
        copy.delete({chunk.chunk_id for chunk, _ in copy.rows()} - set(names))
        for key in ("signature", "model", "dtype"):
            if (value := index.get_setting(key)) is not None:
                copy.set_setting(key, value)
    finally:
        copy.close()


def copy_packets(index: PacketIndex, engine: KVPacketEngine, folder: Path) -> None:
    """Write the packets of an index to a folder; one that was evicted is encoded again when it is next asked for."""
    copy = DiskStore(folder)
    try:
        for chunk, packet_id in index.rows():
            try:
                packet = engine.store.get(packet_id, engine.signature)
            except PacketError:
                continue
            copy.put(packet, chunk.text.strip(), chunk.chunk_id)
        _drop_all_but(index, copy, engine)
    finally:
        copy.close()


def _drop_all_but(index: PacketIndex, store: DiskStore, engine: KVPacketEngine) -> None:
    kept = {packet_id for _, packet_id in index.rows()}
    for known in list(store.known(engine.signature)):
        if known.packet_id not in kept:
            store.delete(known.packet_id)
