"""Whatever happens to a packet's file, the answer is the packet or a refusal, never something else."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harm_samples import ask_after_mutations
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)

from kvpacket_rag.errors import PacketCorruptError, PacketNotFoundError, StoreError
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

PACKET = make_packet(1)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """Holds PACKET and one more."""
    opened = DiskStore(tmp_path / "store")
    opened.put(PACKET, "text", "owner")
    opened.put(make_packet(2), "other text", "owner")
    return opened


@pytest.fixture
def path(tmp_path: Path, store: DiskStore) -> Path:
    """The file of PACKET."""
    return tmp_path / "store" / "packets" / PACKET.packet_id[:2] / f"{PACKET.packet_id}.safetensors"


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the JSON header of a safetensors file and leave a file that is otherwise whole."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def swap(path: Path) -> None:
    name = packet_id([2], SIGNATURE)
    path.write_bytes((path.parents[1] / name[:2] / f"{name}.safetensors").read_bytes())


def make_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def make_link(path: Path) -> None:
    outside = path.parents[3] / "outside.safetensors"
    shutil.move(path, outside)
    path.symlink_to(outside)


def edit(key: str, value: str) -> Callable[[Path], None]:
    return lambda path: rewrite_header(path, lambda header: header["__metadata__"].update({key: value}))


def reshape(path: Path) -> None:
    rewrite_header(path, lambda header: header["0"].update(shape=[3, 2, 5, 8]))


def retype(path: Path) -> None:
    rewrite_header(path, lambda header: header["0"].update(dtype="I32"))


def exchange(path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["0"], header["1"] = header["1"], header["0"]

    rewrite_header(path, change)


HARM: dict[str, Callable[[Path], object]] = {
    "last bit flipped": lambda path: flip(path, 8 * path.stat().st_size - 1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zero tail": lambda path: path.write_bytes(path.read_bytes()[:-400] + b"\0" * 400),
    "all zeros": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "another packet's file": swap,
    "a folder": make_folder,
    "a link to the outside": make_link,
    "header of an exabyte": lambda path: path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:]),
    "header of 50 MB": lambda path: path.write_bytes((50 << 20).to_bytes(8, "little") + b" " * (50 << 20)),
    "shape edited": reshape,
    "dtype edited": retype,
    "tensors exchanged": exchange,
    "tensor renamed": lambda path: rewrite_header(path, lambda header: header.update({"2": header.pop("1")})),
    "tensor dropped": lambda path: rewrite_header(path, lambda header: header.pop("1")),
    "metadata dropped": lambda path: rewrite_header(path, lambda header: header.pop("__metadata__")),
    "span edited": edit("span", "6"),
    "tokens edited": edit("num_tokens", "4"),
    "tokens negative": edit("num_tokens", "-5"),
    "span no number": edit("span", "many"),
    "id edited": edit("packet_id", "0" * 64),
    "version edited": edit("format_version", "2"),
    "checksum edited": edit("sha256", "0" * 64),
    "signature edited": edit("signature", SIGNATURE.to_json().replace("none", "some", 1)),
    "signature nested deep": edit("signature", "[" * 10_000),
    "key added": edit("note", "hello"),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_file_is_refused_set_aside_and_replaced_by_the_next_put(
    store: DiskStore, path: Path, harm: Callable[[Path], object]
) -> None:
    store.get(PACKET.packet_id, SIGNATURE)
    harm(path)
    with pytest.raises(PacketCorruptError, match="set aside, encode the chunk again"):
        store.get(PACKET.packet_id, SIGNATURE)
    assert PACKET.packet_id not in store and len(store) == 1 and not path.exists()
    assert os.path.lexists(path.parents[2] / "quarantine" / path.name)
    with pytest.raises(PacketNotFoundError, match="quarantined"):
        store.get(PACKET.packet_id, SIGNATURE)
    assert [chunk.text for chunk in store.known(SIGNATURE)] == ["text", "other text"]
    store.put(PACKET, "text")
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)
    assert not os.path.lexists(path.parents[2] / "quarantine" / path.name)


def test_any_bit_flipped_is_refused(store: DiskStore, path: Path) -> None:
    whole, chance = path.read_bytes(), random.Random(0)
    for bit in chance.sample(range(8 * len(whole)), 100):
        flip(path, bit)
        with pytest.raises(PacketCorruptError):
            store.get(PACKET.packet_id, SIGNATURE)
        store.put(PACKET, "text")
        assert path.read_bytes() == whole


def test_any_cut_is_refused(store: DiskStore, path: Path) -> None:
    whole, chance = path.read_bytes(), random.Random(1)
    for size in chance.sample(range(len(whole)), 60):
        path.write_bytes(whole[:size])
        assert PACKET.packet_id not in store
        with pytest.raises(PacketCorruptError):
            store.get(PACKET.packet_id, SIGNATURE)
        store.put(PACKET, "text")


def test_a_cut_file_is_replaced_by_the_next_put_without_being_read(store: DiskStore, path: Path) -> None:
    os.truncate(path, 100)
    store.put(PACKET, "text")
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_under_a_packets_name_is_refused_without_running(store: DiskStore, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "the bomb ran"
    path.write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(PacketCorruptError):
        store.get(PACKET.packet_id, SIGNATURE)
    assert not target.exists()


@pytest.mark.parametrize("rounds", [45, pytest.param(1000, marks=pytest.mark.slow)])
def test_whatever_is_damaged_the_answer_is_right_and_the_miss_is_counted_and_mended(
    backbone: Any, tmp_path: Path, rounds: int
) -> None:
    assert ask_after_mutations(backbone, tmp_path / "a" / "b" / "store", rounds) == rounds


def test_the_damaged_file_goes_with_its_text(store: DiskStore, path: Path) -> None:
    flip(path, 8 * path.stat().st_size - 1)
    with pytest.raises(PacketCorruptError):
        store.get(PACKET.packet_id, SIGNATURE)
    store.delete(PACKET.packet_id)
    assert not any((path.parents[2] / "quarantine").iterdir()) and len(list(store.known(SIGNATURE))) == 1


def test_damaged_files_count_under_the_cap_and_are_the_first_to_go(tmp_path: Path) -> None:
    folder = tmp_path / "capped"
    store = DiskStore(folder, max_bytes=7000)
    for seed in range(3):
        store.put(make_packet(seed), "text", "owner")
    last = packet_id([2], SIGNATURE)
    flip(folder / "packets" / last[:2] / f"{last}.safetensors", 8 * 2000)
    with pytest.raises(PacketCorruptError):
        store.get(last, SIGNATURE)
    store.put(make_packet(3), "text")
    assert len(store) == 3 and store.size_bytes <= 7000 and not any((folder / "quarantine").iterdir())


def test_damage_that_cannot_be_set_aside_is_refused_all_the_same(
    store: DiskStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    flip(path, 8 * path.stat().st_size - 1)
    monkeypatch.setattr(os, "replace", refuse)
    for _ in range(2):
        with pytest.raises(PacketCorruptError, match="read-only"):
            store.get(PACKET.packet_id, SIGNATURE)


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 0), Path.unlink], ids=["emptied", "deleted"])
def test_packets_without_a_catalogue_are_not_swept(
    tmp_path: Path, store: DiskStore, path: Path, damage: Callable[[Path], None]
) -> None:
    store.close()
    damage(tmp_path / "store" / "packets.sqlite")
    for sweep in (True, False):
        with pytest.raises(StoreError, match="packet files lie beside it"):
            DiskStore(tmp_path / "store", sweep=sweep)
    assert path.exists()


@pytest.mark.parametrize("size", ["-5000000", "'abc'", "4611686018427387904"])
def test_a_damaged_size_does_not_lift_the_cap(tmp_path: Path, store: DiskStore, path: Path, size: str) -> None:
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store" / "packets.sqlite")) as catalogue:
        catalogue.execute(f"UPDATE packets SET size_bytes = {size} WHERE packet_id = ?", (PACKET.packet_id,))
        catalogue.commit()
    with contextlib.closing(DiskStore(tmp_path / "store")) as uncapped:
        assert PACKET.packet_id in uncapped.check().damaged_rows
    cap = 3 * path.stat().st_size
    with contextlib.closing(DiskStore(tmp_path / "store", cap)) as capped:
        assert same(capped.get(PACKET.packet_id, SIGNATURE), PACKET)
        for number in range(3, 12):
            capped.put(make_packet(number), f"text {number}")
        files = list((tmp_path / "store" / "packets").rglob("*.safetensors"))
        assert capped.size_bytes == sum(file.stat().st_size for file in files) <= cap
        assert capped.check().is_sound


def places(content: bytes, wanted: bytes) -> list[int]:
    return [place for place in range(len(content)) if content.startswith(wanted, place)]


def test_a_flipped_bit_in_the_catalogue_makes_no_deletion_report_success_in_vain(tmp_path: Path) -> None:
    file = tmp_path / "packets.sqlite"
    with contextlib.closing(DiskStore(tmp_path)) as store:
        store.put(PACKET, "text", "owner-of-it")
    whole, packet = file.read_bytes(), next(tmp_path.rglob("*.safetensors"))
    content, page = packet.read_bytes(), int.from_bytes(whole[16:18], "big")
    tried, names = 0, (b"owner-of-it", PACKET.packet_id.encode())
    for place in [place for name in names for place in places(whole, name)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        packet.write_bytes(content)
        with contextlib.closing(DiskStore(tmp_path, sweep=False)) as store:
            tried += 1
            with contextlib.suppress(StoreError):
                store.drop_owners(["owner-of-it"])
                assert not list(store._catalogue.rows()), f"byte {place % page} of page {place // page}"
    assert tried > 1


@pytest.mark.parametrize("sql", ["owner = 'owner-of-iu'", "owner = CAST(owner AS BLOB)", "digest = x''"])
def test_a_damaged_owner_is_found_and_repaired_and_keeps_nothing_alive(tmp_path: Path, sql: str) -> None:
    for repair in (True, False):
        with contextlib.closing(DiskStore(tmp_path)) as store:
            store.put(PACKET, "text", "owner-of-it")
            store.put(make_packet(2), "other text", "owner")
        with contextlib.closing(sqlite3.connect(tmp_path / "packets.sqlite")) as catalogue:
            catalogue.execute(f"UPDATE owners SET {sql} WHERE owner = 'owner-of-it'")
            catalogue.commit()
        with contextlib.closing(DiskStore(tmp_path)) as store:
            assert store.check().damaged_rows == [PACKET.packet_id]
            store.check(repair=True) if repair else store.drop_owners(["owner-of-it"])
            assert [chunk.text for chunk in store.known(SIGNATURE)] == ["other text"] and store.check().is_sound
