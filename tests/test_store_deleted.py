"""What was deleted is nowhere: in no file of the folder, in no answer of another process, in nothing it can read."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNKS
from pipeline_samples import LEASE, NEW_LEASE, documents, packet_files, pipeline
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.documents import Document
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import FILE_NAME, PacketIndex
from kvpacket_rag.journal import remove_document
from kvpacket_rag.packet import packet_id
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.store import DiskStore, MemoryStore

SECRET = "the secret harvest of nineteen eighty-four "


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_deleted_text_is_in_no_file_while_others_have_the_store_open(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path), DiskStore(tmp_path)
    store.put(make_packet(1), SECRET * 200, "owner")
    store.put(make_packet(2), "stays", "owner 2")
    assert len(list(other.known(SIGNATURE))) == 2 and b"secret harvest" in on_disk(tmp_path)
    store.drop_owners(["owner"])
    assert b"secret harvest" not in on_disk(tmp_path)
    assert [chunk.text for chunk in other.known(SIGNATURE)] == ["stays"]


def test_a_flipped_bit_of_the_index_makes_no_deletion_report_success_in_vain(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    chunks = [Chunk(f"the-one:{number}", f"text {number}", "the-one") for number in range(3)]
    with contextlib.closing(PacketIndex.open(tmp_path)) as index:
        index.add([Chunk("other", "other text", "other"), *chunks], np.eye(4, dtype=np.float32), list("0123"))
    whole, tried = file.read_bytes(), 0

    def there() -> list[Any]:
        with contextlib.closing(sqlite3.connect(file)) as db:
            return db.execute("SELECT chunk_id FROM chunks WHERE +document_id = 'the-one'").fetchall()

    for place in [place for place in range(len(whole)) if whole.startswith(b"the-one", place)]:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        tried += len(there()) == 3  # else the table itself names another
        with contextlib.suppress(StoreError), contextlib.closing(PacketIndex.open(tmp_path, load=False)) as index:
            remove_document(index, MemoryStore(), "the-one")
            assert not there(), f"byte {place}"
    assert tried > 1


def test_the_deleted_or_replaced_text_is_in_no_file_while_others_have_the_index_open(tmp_path: Path) -> None:
    index, other = PacketIndex.open(tmp_path), PacketIndex.open(tmp_path)
    index.add([Chunk("a", SECRET * 300), Chunk("b", SECRET), Chunk("c", "stays")], np.eye(3), ["p"] * 3)
    assert len(other.search([1, 0, 0], 3)) == 3 and b"secret harvest" in on_disk(tmp_path)
    index.delete(["a"])
    index.add([Chunk("b", "something else")], np.eye(3)[1:2], ["p"])
    assert b"secret harvest" not in on_disk(tmp_path) and b"stays" in on_disk(tmp_path)
    assert [hit.chunk.text for hit in other.search([1, 0, 0], 3)] == ["something else", "stays"]
    index.close()
    other.close()


def test_a_reader_that_holds_up_the_log_delays_the_erasure_until_the_next_change(tmp_path: Path) -> None:
    index, other = PacketIndex.open(tmp_path), PacketIndex.open(tmp_path)
    index.add([Chunk("a", SECRET), Chunk("b", "stays")], np.eye(2), ["p"] * 2)
    with other._rows.file.reading():
        assert other.get(["a"])
        index.delete(["a"])
    index.set_setting("any", "change")
    assert b"secret harvest" not in on_disk(tmp_path)
    index.close()
    other.close()


@pytest.mark.parametrize("seed", [6, 12])  # of which SQLite, left to itself, keeps copies
def test_whatever_was_put_and_deleted_closing_leaves_only_what_is_there(tmp_path: Path, seed: int) -> None:
    chance, index = random.Random(seed), PacketIndex.open(tmp_path)
    alive: dict[str, str] = {}
    gone: set[str] = set()
    for step in range(80):
        names = [f"c{chance.randrange(25)}" for _ in range(5)]
        gone.update(mark for name in names if (mark := alive.pop(name, "")))
        if chance.random() < 0.6:
            marks = {name: f"<mark {step} {name}>" for name in names}
            chunks = [Chunk(name, mark * chance.randint(1, 150)) for name, mark in marks.items()]
            index.add(chunks, np.eye(5)[: len(chunks)], ["p"] * len(chunks))
            alive |= marks
        else:
            index.delete(names)
    index.close()
    content = on_disk(tmp_path)
    assert all(mark.encode() in content for mark in alive.values())
    assert not [mark for mark in gone if mark.encode() in content] and len(gone) > 50


@pytest.mark.parametrize("change", ["delete", "update", "metadata"])
def test_names_and_metadata_of_what_is_gone_are_in_no_file_while_it_is_open(
    backbone: Any, tmp_path: Path, change: str
) -> None:
    with pipeline(backbone, tmp_path, chunk_tokens=90) as rag:
        rag.add([Document("secret-name", LEASE, {"title": "secret title"}), *documents(CHUNKS[2:])])
        assert all(mark in on_disk(tmp_path) for mark in (b"secret-name", b"secret title", b"Ada Marlow"))
        gone = [b"secret title", *([b"secret-name"] if change == "delete" else [])]
        if change == "delete":
            rag.delete("secret-name")
        elif change == "update":
            rag.add([Document("secret-name", LEASE, {"title": "another"})])
        else:
            rag.index.set_metadata(rag.index.chunk_ids("secret-name")[0], {"title": "another"})
        assert not [mark for mark in gone if mark in on_disk(tmp_path)]


@pytest.fixture
def two(backbone: Any, tmp_path: Path) -> Iterator[tuple[KVPacketRAG, KVPacketRAG]]:
    """One folder opened twice, as by two processes."""
    with pipeline(backbone, tmp_path, chunk_tokens=90) as one, pipeline(backbone, tmp_path, chunk_tokens=90) as other:
        yield one, other


@pytest.mark.parametrize("change", ["delete", "update"])
def test_another_process_that_had_it_open_answers_from_nothing_that_is_gone(
    two: tuple[KVPacketRAG, KVPacketRAG], change: str, tmp_path: Path
) -> None:
    one, other = two
    one.add([Document("lease", LEASE), *documents(CHUNKS[2:])])
    before = other.ask(LEASE, k=3)
    assert "Ada Marlow" in before.hits[0].chunk.text and before.answer.usage.chunks_reused > 0
    old = before.hits[0].packet_id
    one.delete("lease") if change == "delete" else one.add([Document("lease", NEW_LEASE)])
    after = other.ask(LEASE, k=3)
    assert not any("Ada Marlow" in hit.chunk.text for hit in after.hits) and old not in other.engine.store
    assert not any("Ada Marlow" in known.text for known in other.engine.store.known(other.engine.signature))
    assert old not in packet_files(tmp_path) and b"Ada Marlow" not in on_disk(tmp_path)
    reused = other.engine.generate(f"{LEASE}\n\nWho signed?").usage  # who still has the text gets no packet of it
    assert reused.chunks_reused == 0


def test_the_bytes_are_free_once_nobody_holds_them(tmp_path: Path) -> None:
    store, packet = DiskStore(tmp_path), make_packet(1)
    store.put(packet, "text", "owner")
    held = store.get(packet.packet_id, SIGNATURE)
    store.drop_owners(["owner"])
    assert same(held, packet) and packet_files(tmp_path) == set() and store.size_bytes == 0
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert packet.packet_id in maps.read_text()
        del held
        assert packet.packet_id not in maps.read_text()
    assert packet_id([1], SIGNATURE) not in store
