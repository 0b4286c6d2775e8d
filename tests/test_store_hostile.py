"""Files made to harm: refused without running, without filling memory, and without touching anything outside."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sqlite3
import threading
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)
from test_store_damage import Bomb

from kvpacket_rag.cli import main
from kvpacket_rag.errors import KVPacketError, PacketCorruptError, PacketError, StoreError, StoreFormatError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.store import DiskStore
from kvpacket_rag.store.packet_file import packet_parts, read_packet
from kvpacket_rag.store.schema import row_digest

PACKET = make_packet(1, num_tokens=2)
WHOLE = b"".join(map(bytes, packet_parts(PACKET)))
END = 8 + int.from_bytes(WHOLE[:8], "little")
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def with_header(header: str | bytes, body: bytes = WHOLE[END:]) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + body


def refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(PacketCorruptError):
        read_packet(path, PACKET.packet_id, SIGNATURE, verify=True)


@fuzz
@given(st.binary(max_size=400))
def test_any_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    refuse(tmp_path / "file", content)


@fuzz
@given(st.dictionaries(st.sampled_from(["__metadata__", "0", "1", "2"]), json_values, max_size=4))
def test_any_header_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    refuse(tmp_path / "file", with_header(json.dumps(header)))


@fuzz
@given(st.sampled_from(["format_version", "packet_id", "signature", "span", "num_tokens", "sha256"]), st.text())
def test_any_other_metadata_is_refused(tmp_path: Path, key: str, value: str) -> None:
    header = json.loads(WHOLE[8:END])
    if header["__metadata__"][key] == value:
        return
    header["__metadata__"][key] = value
    refuse(tmp_path / "file", with_header(json.dumps(header)))


@fuzz
@given(json_values)
def test_any_text_is_a_signature_or_refused(value: Any) -> None:
    with contextlib.suppress(PacketError):
        PacketSignature.from_json(json.dumps(value))


@settings(fuzz, max_examples=20)
@given(st.binary(min_size=2, max_size=600))
def test_any_bytes_in_place_of_a_database_are_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    for name, opener in (("packets.sqlite", DiskStore), ("index.sqlite", PacketIndex.open)):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(StoreFormatError):
            opener(tmp_path)
        assert path.read_bytes() == content


def entry(start: int, stop: int, shape: list[int]) -> str:
    return json.dumps({"dtype": "F32", "shape": shape, "data_offsets": [start, stop]})


FORGED = {
    "a billion tokens": '{"0":' + entry(0, 4, [2, 3, 10**9, 8]) + "}",
    "more than all memory": '{"0":' + entry(0, 2**60, [2**29, 2**29, 1, 1]) + "}",
    "sizes that overflow": '{"0":' + entry(0, 0, [2**32, 2**32, 2**32, 1]) + "}",
    "overlap": '{"0":' + entry(0, 96, [2, 3, 1, 4]) + ',"1":' + entry(48, 144, [2, 3, 1, 4]) + "}",
    "a hole": '{"0":' + entry(48, 144, [2, 3, 1, 4]) + "}",
    "backwards": '{"0":' + entry(96, 0, [2, 3, 1, 4]) + "}",
    "twice one name": '{"0":' + entry(0, 96, [2, 3, 1, 4]) + ',"0":' + entry(96, 192, [2, 3, 1, 4]) + "}",
    "very many tensors": "{" + ",".join(f'"{n}":{entry(0, 0, [0])}' for n in range(14_000)) + "}",
    "nested deep": '{"0":' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_headers_are_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    tracemalloc.start()
    refuse(tmp_path / "file", with_header(FORGED[name]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_a_pickle_under_any_name_of_the_folder_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "the bomb ran"
    bomb = pickle.dumps(Bomb(target))
    for name in ("packets.sqlite", "packets.sqlite-wal", "index.sqlite", "index.sqlite-wal", ".changing.lock"):
        folder = tmp_path / name.replace(".", "")
        folder.mkdir()
        (folder / name).write_bytes(bomb)
        for opener in (DiskStore, PacketIndex.open):
            with contextlib.suppress(StoreError):
                opener(folder).close()
    assert not target.exists()


@pytest.mark.parametrize("state", ["stored", "evicted", "quarantined"])
@pytest.mark.parametrize("up", range(1, 5))
def test_a_forged_row_deletes_no_file_outside(tmp_path: Path, state: str, up: int) -> None:
    root = tmp_path / "a" / "b" / "store"
    store = DiskStore(root)
    store.put(make_packet(0), "text", "owner")
    victims = [folder / "victim.safetensors" for folder in (root, *list(root.parents)[:3], root / "packets")]
    for victim in victims:
        victim.write_bytes(b"dear")
    values = ("../" * up + "victim", SIGNATURE.to_json(), "t", 1, 10**6, state, "", 0, b"")
    store._catalogue._writer.execute("INSERT INTO packets VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)  # type: ignore[union-attr]
    store.close()
    again = DiskStore(root, max_bytes=5000)  # sweeps, and evicts
    again.put(make_packet(1), "text")
    again.check(repair=True)
    assert all(victim.read_bytes() == b"dear" for victim in victims) and again.check().is_sound


def test_links_in_place_of_the_stores_own_folders_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    store = DiskStore(root)
    store.put(PACKET, "text", "owner")
    shard = root / "packets" / PACKET.packet_id[:2]
    os.rename(shard, outside)
    shard.symlink_to(outside)
    content = [path.read_bytes() for path in outside.iterdir()]
    with pytest.raises(PacketError, match="missing"):
        store.get(PACKET.packet_id, SIGNATURE)
    store.put(PACKET, "text")
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET) and not shard.is_symlink()
    os.rename(shard, tmp_path / "again")
    shard.symlink_to(outside)
    DiskStore(root).drop_owners(["owner"])
    assert content == [path.read_bytes() for path in outside.iterdir()]


@pytest.mark.parametrize("name", ["packets", "quarantine", "packets.sqlite", "index.sqlite", "packets.sqlite-wal"])
def test_a_store_of_links_is_refused(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    DiskStore(root).close()
    PacketIndex.open(root).close()
    outside.mkdir() if "." not in name else outside.write_bytes(b"")
    path = root / name
    if path.exists():
        path.rmdir() if path.is_dir() else path.unlink()
    path.symlink_to(outside)
    with pytest.raises(StoreError, match="is a link"):
        PacketIndex.open(root) if name.startswith("index") else DiskStore(root)
    assert list(outside.iterdir()) == [] if outside.is_dir() else outside.read_bytes() == b""


@fuzz
@given(st.text(min_size=1, max_size=300))
def test_no_namespace_leads_out_of_its_folder(name: str) -> None:
    with contextlib.suppress(StoreError):
        folder = namespace_folder("/base", name)
        assert folder.parent == Path("/base/namespaces") and ".." not in folder.parts
        assert os.path.normpath(folder) == str(folder)


def test_a_catalogue_with_other_columns_is_an_error_not_a_crash(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "packets.sqlite") as connection:
        for table in ("packets", "owners", "totals"):
            connection.execute(f"CREATE TABLE {table} (a)")
        connection.execute("CREATE TABLE meta (key, value)")
        connection.execute("INSERT INTO meta VALUES ('format_version', '2')")
    connection.close()
    with pytest.raises(KVPacketError):
        DiskStore(tmp_path).put(PACKET, "text")


@pytest.mark.parametrize("name", ["index.sqlite", "packets.sqlite"])
def test_a_planted_journal_deletes_no_file(tmp_path: Path, name: str) -> None:
    def opened() -> PacketIndex | DiskStore:
        return PacketIndex.open(tmp_path) if name == "index.sqlite" else DiskStore(tmp_path)

    opened().close()
    victim, page = tmp_path / "victim.txt", int.from_bytes((tmp_path / name).read_bytes()[16:18], "big")
    victim.write_text("precious")
    magic, said = bytes.fromhex("d9d505f920a163d7"), str(victim).encode()
    pages = (tmp_path / name).stat().st_size // page
    head = magic + b"".join(number.to_bytes(4, "big") for number in (0, 7, pages, 512, page))
    end = said + len(said).to_bytes(4, "big") + sum(said).to_bytes(4, "big") + magic
    (tmp_path / f"{name}-journal").write_bytes(
        head.ljust(512, b"\0") + (0x40000000 // page + 1).to_bytes(4, "big") + end
    )
    with pytest.raises(StoreError, match="remove it"):
        opened()
    assert victim.read_text() == "precious"
    (tmp_path / f"{name}-journal").unlink()
    opened().close()


def test_holding_what_is_no_packet_file_waits_for_nothing(tmp_path: Path) -> None:
    with contextlib.closing(DiskStore(tmp_path)) as store:
        store.put(PACKET, "text")
        path = store._folder.path_of(PACKET.packet_id)
        path.unlink()
        os.mkfifo(path)
        for kind in ("pipe", "link to a pipe"):
            if kind != "pipe":
                path.rename(tmp_path / "pipe")
                path.symlink_to(tmp_path / "pipe")
            thread = threading.Thread(target=store.hold, args=[[PACKET.packet_id, "evil"]], daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive(), kind


def test_a_row_of_no_packet_id_is_passed_over(tmp_path: Path) -> None:
    with contextlib.closing(DiskStore(tmp_path)) as store:
        store.put(PACKET, "text")
        with contextlib.closing(sqlite3.connect(tmp_path / "packets.sqlite")) as db:
            signature, text, tokens = db.execute("SELECT signature, text, num_tokens FROM packets").fetchone()
            db.execute(
                "UPDATE packets SET packet_id = 'evil', digest = ?", (row_digest("evil", signature, text, tokens),)
            )
            db.commit()
        assert list(store.known(SIGNATURE)) == []
        with store.hold(["evil"]):
            pass


OBJECTS = [
    "CREATE TRIGGER evil AFTER INSERT ON packets BEGIN DELETE FROM owners; END",
    "CREATE VIEW evil AS SELECT * FROM packets",
    "CREATE TABLE evil (a)",
    "DROP TRIGGER count_gone",
    "DROP TRIGGER count_new; CREATE TRIGGER count_new AFTER INSERT ON packets BEGIN DELETE FROM owners; END",
]


@pytest.mark.parametrize("sql", OBJECTS)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_catalogue_with_more_or_less_in_it_than_we_made_is_refused(tmp_path: Path, sql: str, version: int) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "data" / f"store-format-{[1, 2, 4][version - 1]}.zip") as archive:
        archive.extractall(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "packets.sqlite")) as catalogue:
        catalogue.executescript(sql)
    with pytest.raises(StoreFormatError, match=r"not laid out as this program does it: .*move its folder away"):
        DiskStore(tmp_path)


@pytest.mark.parametrize("name", ["index.sqlite", "packets.sqlite", "index.sqlite-wal", "packets.sqlite-shm"])
@pytest.mark.parametrize(("make", "told"), [(os.mkfifo, "a pipe"), (os.mkdir, "a folder")])
def test_what_is_no_file_in_place_of_a_database_is_said(
    tmp_path: Path, name: str, make: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DiskStore(tmp_path).close()
    PacketIndex.open(tmp_path).close()
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(StoreError, match=f"{name}' is {told}, expected a plain file; move it away"):
        PacketIndex.open(tmp_path) if name.startswith("index") else DiskStore(tmp_path)
    assert main(["check", str(tmp_path)]) == 1 and f"is {told}, expected" in capsys.readouterr().err
