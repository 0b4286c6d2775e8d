"""A thousand kinds of damage, drawn by seed: never a wrong packet or text, always an error that says so."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_store import SIGNATURE, make_packet, same

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.errors import KVPacketError, PacketCorruptError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore, MemoryStore
from kvpacket_rag.store.packet_file import packet_parts, read_packet

PACKET, OTHER = make_packet(1, num_tokens=2), make_packet(2, num_tokens=2)
TEXTS = {packet_id([seed], SIGNATURE): f"text {seed} of the harbour office " * 4 for seed in range(8)}

Mutation = Callable[[random.Random, Path, bytes], None]


def flip(chance: random.Random, path: Path, whole: bytes) -> None:
    content, bit = bytearray(whole), chance.randrange(8 * len(whole))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(chance: random.Random, path: Path, whole: bytes) -> None:
    path.write_bytes(whole[: chance.randrange(len(whole))])


def zero_tail(chance: random.Random, path: Path, whole: bytes) -> None:
    start = chance.randrange(len(whole.rstrip(b"\0")))
    path.write_bytes(whole[:start] + bytes(len(whole) - start))


def forge_length(chance: random.Random, path: Path, whole: bytes) -> None:
    length = chance.choice([chance.randrange(2**16), chance.randrange(2**32), chance.randrange(2**64)])
    path.write_bytes(length.to_bytes(8, "little") + whole[8:])


def swap(chance: random.Random, path: Path, whole: bytes) -> None:
    path.write_bytes(b"".join(map(bytes, packet_parts(OTHER))))


def overwrite(chance: random.Random, path: Path, whole: bytes) -> None:
    start, length = chance.randrange(len(whole)), chance.randint(2, 64)
    noise = chance.randbytes(length)
    changed = whole[:start] + noise + whole[start + length :]
    path.write_bytes(changed if changed != whole else whole[:-1])


def edit_header(chance: random.Random, path: Path, whole: bytes) -> None:
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    about, tensor = header["__metadata__"], header[chance.choice("01")]
    edits: list[Callable[[], object]] = [
        lambda: tensor.update(dtype=chance.choice(["F16", "BF16", "I32", "U8", "F64", "BOOL", "F8_E4M3"])),
        lambda: tensor.update(shape=chance.sample(tensor["shape"] + [1], 4)),
        lambda: tensor.update(data_offsets=[n + chance.randint(1, 64) for n in tensor["data_offsets"]]),
        lambda: about.update({chance.choice(list(about)): str(chance.randrange(10**6))}),
        lambda: about.pop(chance.choice(list(about))),
        lambda: about.update(note="added"),
        lambda: header.update({str(chance.randint(2, 9)): dict(tensor)}),
    ]
    chance.choice(edits)()
    if json.loads(whole[8:end]) == header:
        about["note"] = "added"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


def make_folder(chance: random.Random, path: Path, whole: bytes) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def link_outside(chance: random.Random, path: Path, whole: bytes) -> None:
    outside = path.parents[3] / f"outside {chance.random()}"
    outside.write_bytes(whole)  # even a whole packet is not followed to
    path.unlink()
    path.symlink_to(outside)


MUTATIONS: dict[str, tuple[Mutation, int]] = {
    "bit": (flip, 400),
    "cut": (cut, 150),
    "zero tail": (zero_tail, 100),
    "header length": (forge_length, 100),
    "noise": (overwrite, 100),
    "header": (edit_header, 150),
    "swapped": (swap, 2),
    "folder": (make_folder, 2),
    "link": (link_outside, 2),
}


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: damage is done by hand here, not by power cuts."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_mutation_of_a_file_is_refused_by_the_reader(tmp_path: Path, kind: str) -> None:
    mutate, times = MUTATIONS[kind]
    chance, whole = random.Random(kind), b"".join(map(bytes, packet_parts(PACKET)))
    path = tmp_path / "a" / "b" / "c" / "packet"
    for round_ in range(times):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        mutate(chance, path, whole)
        with pytest.raises(PacketCorruptError):
            pytest.fail(f"round {round_}: {read_packet(path, PACKET.packet_id, SIGNATURE, verify=True)}")
        shutil.rmtree(path.parent)


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_mutation_is_a_counted_miss_with_its_file_and_reason_set_aside(tmp_path: Path, kind: str) -> None:
    mutate, _ = MUTATIONS[kind]
    store, chance = DiskStore(tmp_path / "store"), random.Random(kind)
    store.put(PACKET, "text", "owner")
    path = tmp_path / "store" / "packets" / PACKET.packet_id[:2] / f"{PACKET.packet_id}.safetensors"
    whole = path.read_bytes()
    for round_ in range(1, 4):
        mutate(chance, path, whole)
        with pytest.raises(PacketCorruptError, match="set aside"):
            store.get(PACKET.packet_id, SIGNATURE)
        row = store._catalogue.find(PACKET.packet_id)
        assert row is not None and row.state == "quarantined" and row.reason
        assert store.metrics.snapshot().misses == {"damaged": round_} and not os.path.lexists(path)
        store.put(PACKET, "text")  # what a request does with the packet it encoded again
        assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET) and path.read_bytes() == whole
    store.close()


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """The catalogue of a store of eight packets, closed."""
    store = DiskStore(tmp_path / "store")
    for seed, text in enumerate(TEXTS.values()):
        store.put(make_packet(seed, num_tokens=2), text, f"owner {seed}")
    store.close()
    path = tmp_path / "store" / "packets.sqlite"
    yield path, path.read_bytes()


@pytest.mark.usefixtures("fast_disk")
def test_a_flipped_bit_of_the_catalogue_never_gives_a_text_another_packet(catalogue: tuple[Path, bytes]) -> None:
    path, whole = catalogue
    chance, found = random.Random(5), [0, 0, 0]
    used = [place for place in range(len(whole)) if whole[place]]  # most of the file is empty
    for _ in range(60):
        content, place = bytearray(whole), chance.choice(used)
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        found[_read_all(path.parent)] += 1
        for rest in path.parent.glob("packets.sqlite-*"):
            rest.unlink()
    assert found[0] and found[1] and found[2], "of the mutations, some must hurt and some not"


def _read_all(root: Path) -> int:
    """0 when all is there, 1 when something is known to be lost, 2 when the store says that it is damaged."""
    try:
        store = DiskStore(root)
    except StoreError:
        return 2
    try:
        known = list(store.known(SIGNATURE))
        assert all(TEXTS[chunk.packet_id] == chunk.text and chunk.num_tokens == 2 for chunk in known)
        for seed, name in enumerate(TEXTS):
            try:
                assert same(store.get(name, SIGNATURE), make_packet(seed, num_tokens=2))
            except KVPacketError:
                return 1
        return 0 if len(known) == len(TEXTS) else 1
    except StoreError:
        return 2
    finally:
        with contextlib.suppress(StoreError):
            store.close()


def test_a_row_whose_text_was_edited_is_passed_over_and_written_anew(catalogue: tuple[Path, bytes]) -> None:
    path, _ = catalogue
    first, *rest = TEXTS
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE packets SET text = 'a forged text' WHERE packet_id = ?", (first,))
        connection.execute("UPDATE packets SET signature = 'forged' WHERE packet_id = ?", (rest[0],))
    connection.close()
    store = DiskStore(path.parent)
    assert {chunk.packet_id for chunk in store.known(SIGNATURE)} == set(rest[1:])
    assert store.metrics.snapshot().damaged_rows == 1
    revision = store.revision()
    for seed, name in enumerate((first, rest[0])):
        store.put(make_packet(seed, num_tokens=2), TEXTS[name], only_known=True)
    assert {chunk.packet_id: chunk.text for chunk in store.known(SIGNATURE)} == TEXTS and store.revision() != revision
    assert store.drop_owners(["owner 0"]) == [first]  # owners are kept
    store.close()


def test_damage_to_a_row_of_the_index_is_named_and_never_given_out(tmp_path: Path) -> None:
    index = PacketIndex.open(tmp_path)
    index.add([Chunk(f"c{n}", f"text {n}", f"d{n}") for n in range(3)], np.eye(3), ["p"] * 3)
    for change in ("text = 'forged'", "metadata = '{\"a\": 1}'", "packet_id = 'q'", "text = CAST(x'ff80' AS TEXT)"):
        index._rows.file._db.execute(f"UPDATE chunks SET {change} WHERE chunk_id = 'c1'")
        assert index.search([1, 0, 0], 1)[0].chunk.text == "text 0"
        assert [hit.chunk.text for hit in index.search([0, 1, 0], 3)] == ["text 0", "text 2"] and index.lost == 1
        with pytest.raises(StoreError, match="'c1' is damaged") as caught:
            index.get(["c1"])
        assert "forged" not in str(caught.value) and index._rows.damaged() == {"c1": "d1"}
        index.add([Chunk("c1", "text 1", "d1")], np.eye(3)[1:2], ["p"])
        assert index.get(["c1"]) == [Chunk("c1", "text 1", "d1")]
        assert index.search([0, 1, 0], 1)[0].chunk.text == "text 1" and index.lost == 0
    index.close()


def test_any_damage_to_a_vector_is_found_before_it_finds_other_chunks(tmp_path: Path) -> None:
    index = PacketIndex.open(tmp_path)
    index.add([Chunk(f"c{n}", f"text {n}", f"d{n}") for n in range(8)], np.eye(8) + 0.1, ["p"] * 8)
    db = index._rows.file._db
    (whole,) = db.execute("SELECT vector FROM vectors WHERE seq = 3").fetchone()
    for place in range(0, 8 * len(whole), 7):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        db.execute("UPDATE vectors SET vector = ? WHERE seq = 3", (bytes(content),))
        assert index.damaged() == {"c2": "d2"}
        assert _found_without(tmp_path) == {f"c{n}" for n in range(8)} - {"c2"}
        with pytest.raises(StoreError, match="vector of chunk 'c2' is damaged; run 'kvpacket check DIR --repair'"):
            index.vectors(["c2"])
    with sqlite3.connect(tmp_path / "index.sqlite") as connection:  # which minds no references
        connection.execute("UPDATE vectors SET vector = ?, seq = 99 WHERE seq = 3", (whole,))
    connection.close()
    assert _found_without(tmp_path) == {f"c{n}" for n in range(8)} - {"c2"}
    index.close()


def _found_without(folder: Path) -> set[str]:
    """What a search for all finds where one chunk is lost."""
    with contextlib.closing(PacketIndex.open(folder)) as index:
        assert index.lost == 1
        return {hit.chunk.chunk_id for hit in index.search(np.ones(8), 9)}


@pytest.mark.usefixtures("fast_disk")
def test_a_flipped_bit_of_the_index_never_gives_another_text_or_another_order(tmp_path: Path) -> None:
    index = PacketIndex.open(tmp_path / "index")
    chunks = [Chunk(f"c{n}", f"text {n} of the harbour office " * 4, f"d{n}", {"title": f"T{n}"}) for n in range(8)]
    index.add(chunks, np.eye(8, 16) + 0.1, list(TEXTS))
    index.set_setting("unsettled", '{"d9": ["c9"]}')
    index.close()
    path = tmp_path / "index" / "index.sqlite"
    whole, chance, found = path.read_bytes(), random.Random(5), [0, 0]
    used = [place for place in range(len(whole)) if whole[place]]
    for _ in range(150):
        content, place = bytearray(whole), chance.choice(used)
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        found[_search_all(path.parent, chunks)] += 1
        for rest in path.parent.glob("index.sqlite-*"):
            rest.unlink()
    assert found[0] and found[1], "of the mutations, some must hurt and some not"


def _search_all(folder: Path, chunks: list[Chunk]) -> int:
    """0 when all is there and right, 1 when the index says that it is damaged, or that something is not there."""
    try:
        with contextlib.closing(PacketIndex.open(folder)) as index:
            for number in range(8):
                hits = index.search(np.eye(8, 16)[number] + 0.1, 1)
                if not hits or hits[0].chunk != chunks[number]:
                    assert not hits or (hits[0].chunk in chunks and (index.lost or len(index) < 8))
                    return 1
                assert hits[0].packet_id == list(TEXTS)[number]
            list(index.rows())
            OwnerJournal(index, MemoryStore()).documents()
            return 0
    except StoreError:
        return 1
