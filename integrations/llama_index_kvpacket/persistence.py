"""Where a persisted vector store lies: a small file for LlamaIndex's storage folder, and the folder it points to."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from kvpacket_rag import Chunk, PacketIndex, PacketStore, StoreError, StoreFormatError
from kvpacket_rag.index import FILE_NAME
from kvpacket_rag.journal import change_lock
from kvpacket_rag.origin import Origin
from kvpacket_rag.owners import UNOWNED
from kvpacket_rag.ownership import Ownership
from kvpacket_rag.store import open_store
from llama_index_kvpacket.packets import EMBEDDER, TEXT_KEY, NodePackets

# No JSON on purpose: LlamaIndex opens what it finds in a storage folder as a SimpleVectorStore, and would read any
# JSON object as an empty one without a word.
_HEADER = "kvpacket-rag vector store, format 1: open it with KVPacketVectorStore.from_persist_dir"
_WAITING = "rows_to_take_over"  # a folder beside an index, with one of the rows it is to have


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


def open_index(folder: Path | None, kind: str) -> PacketIndex:
    """The index in a folder, or a new one; what a killed :func:`copy_to` left to be done is done first."""
    if folder is not None and _is_waiting(folder):
        with change_lock(folder):
            _take_over(folder)
    return PacketIndex.open(folder, kind=kind)  # type: ignore[arg-type]  # which says what kinds there are


def copy_to(folder: Path, packets: NodePackets) -> None:
    """Bring a folder to what a store holds: packets first, then all rows at once, then away with what is not needed.

    A folder that is the store's own has the rows already and gets the packets alone.
    """
    with ExitStack() as closing, packets.ownership.threads:
        index, store = open_index(folder, "flat"), open_store(folder)
        closing.callback(index.close)
        closing.callback(store.close)
        signature = packets.engine.signature.to_json()
        if (index.get_setting("signature"), index.get_setting(TEXT_KEY)) != (signature, packets.text_key):
            Origin(index, folder).begin_reencoding(packets.engine)
        rows = list(packets.index.rows())
        names = [chunk.chunk_id for chunk, _ in rows]
        gone = {chunk.chunk_id for chunk, _ in index.rows()} - set(names)
        with Ownership(index, store, packets.packet_of, folder).changing([*names, *gone]) as owners:
            for (chunk, _), owner in zip(rows, owners, strict=False):
                _copy_packet(chunk, owner, packets, store)
            if packets.folder is None:
                _write_rows(rows, packets.index.vectors(names), folder)
                _take_over(folder)
                index.set_setting(UNOWNED, "true")
        if embedder := packets.index.get_setting(EMBEDDER):
            index.set_setting(EMBEDDER, embedder)
        index.set_setting(TEXT_KEY, packets.text_key)
        index.set_setting("signature", signature)


def _copy_packet(chunk: Chunk, owner: str, packets: NodePackets, store: PacketStore) -> None:
    """One that was evicted is encoded again."""
    engine = packets.engine
    (name,) = engine.encode([packets.text_of(chunk)], packets.ownership.owners([chunk.chunk_id]))
    store.put(engine.store.get(name, engine.signature), packets.text_of(chunk).strip(), owner)


def _write_rows(rows: Sequence[tuple[Chunk, str]], vectors: npt.NDArray[np.float32], folder: Path) -> None:
    """Lay rows beside an index, to be taken over: there whole, or not at all."""
    unfinished = folder / f"{_WAITING}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    index = PacketIndex.open(unfinished)
    try:
        index.add([chunk for chunk, _ in rows], vectors, [packet for _, packet in rows])
    finally:
        index.close()
    os.rename(unfinished, folder / _WAITING)


def _take_over(folder: Path) -> None:
    """Make the rows that lie beside an index its own, in place of those it has; may be repeated after a kill."""
    waiting = folder / _WAITING
    if _is_waiting(folder):
        with ExitStack() as closing:
            new, index = PacketIndex.open(waiting), PacketIndex.open(folder)
            closing.callback(new.close)
            closing.callback(index.close)
            rows = list(new.rows())
            names = [chunk.chunk_id for chunk, _ in rows]
            index.add([chunk for chunk, _ in rows], new.vectors(names), [packet for _, packet in rows])
            index.delete({chunk.chunk_id for chunk, _ in index.rows()} - set(names))
    shutil.rmtree(waiting, ignore_errors=True)


def _is_waiting(folder: Path) -> bool:
    return (folder / _WAITING / FILE_NAME).is_file()
