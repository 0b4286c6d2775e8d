"""Object stores that damage, break off, stall or are not there: told, tried again, never believed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from remote_samples import KEYS
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)
from test_store_faults import lock, run, unix
from test_store_remote import (  # noqa: F401 (some are fixtures)
    PACKET,
    file_of,
    files,
    machine_fixture,
    objects_fixture,
    texts,
)

from kvpacket_rag.errors import (
    MissingExtraError,
    PacketCorruptError,
    PacketNotFoundError,
    StoreError,
)
from kvpacket_rag.store import RemoteStore, remote_bucket
from kvpacket_rag.store.remote_bucket import Bucket

READ_ONLY = """
from kvpacket_rag.store import RemoteStore
give_up_rights()
store = RemoteStore(sys.argv[2], root)
assert same(store.get(one, SIGNATURE), make_packet(1)) and len(store) == 1
refused(lambda: store.get(other, SIGNATURE), "can only be read")
store.close()
"""


@unix
def test_a_cache_that_cannot_be_written_is_read(machine: Callable[..., RemoteStore], tmp_path: Path, objects: Path):
    store = machine()
    store.put(PACKET, "text", "owner")
    store.close()
    machine("second").put(make_packet(2), "other", "owner")
    lock(tmp_path / "first")
    run(READ_ONLY, tmp_path / "first", f"file://{objects}")


def test_a_folder_that_was_used_and_is_gone_is_not_made_anew(tmp_path: Path):
    """It may not be mounted; an empty one in its place would make the cache be forgotten."""
    objects, cache = tmp_path / "objects", tmp_path / "cache"
    store = RemoteStore(f"file://{objects}", cache)
    store.put(PACKET, "text")
    store.close()
    objects.rename(tmp_path / "away")
    with pytest.raises(StoreError, match=r"no folder, or is gone .*; mount it, create it, or name another"):
        RemoteStore(f"file://{objects}", cache)
    assert not objects.exists()
    (tmp_path / "away").rename(objects)
    store = RemoteStore(f"file://{objects}", cache)
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET) and store.metrics.snapshot().loads == 0  # of the cache


@pytest.mark.parametrize("url", ["file://", "file:///", "file:///{file}", "file:///{file}/below"])
def test_urls_that_are_no_folder_are_named(tmp_path: Path, url: str):
    (tmp_path / "file").touch()
    url = url.format(file=str(tmp_path / "file").lstrip("/"))
    with pytest.raises(StoreError, match=f"{url.rstrip('/')}.*(expected one such as file:///|name another)"):
        RemoteStore(url, tmp_path / "cache")


@pytest.mark.parametrize("harm", ["cut", "flipped", "empty", "another's"])
def test_a_damaged_object_is_moved_aside_and_the_chunk_encoded_again(
    machine: Callable[..., RemoteStore], objects: Path, harm: str
):
    first = machine()
    first.put(PACKET, "text", "owner")
    content = file_of(objects).read_bytes()
    first.put(make_packet(2), "other", "owner")
    harmed = {
        "cut": content[:-100],
        "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "empty": b"",
        "another's": file_of(objects, make_packet(2)).read_bytes(),
    }
    file_of(objects).write_bytes(harmed[harm])
    second = machine("second")
    with pytest.raises(PacketCorruptError, match="moved to quarantine"):
        second.get(PACKET.packet_id, SIGNATURE)
    assert PACKET.packet_id not in second and not file_of(objects).exists()
    assert (objects / "quarantine" / f"{PACKET.packet_id}.safetensors").read_bytes() == harmed[harm]
    second.put(PACKET, "text", only_known=True)
    assert same(machine("third").get(PACKET.packet_id, SIGNATURE), PACKET)
    assert second.metrics.snapshot().misses == {"damaged": 1}


def test_damage_on_the_way_is_fetched_again(machine: Callable[..., RemoteStore], monkeypatch: pytest.MonkeyPatch):
    machine().put(PACKET, "text")
    store, download, harms = machine("second"), Bucket.download, iter([True])

    def harming(self: Bucket, key: str, path: Path) -> int | None:
        size_bytes = download(self, key, path)
        if next(harms, False):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        return size_bytes

    monkeypatch.setattr(Bucket, "download", harming)
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)
    assert store.metrics.snapshot().loads == 2


@pytest.mark.parametrize(("breaks", "arrives"), [(2, True), (3, False)])
def test_a_transfer_that_breaks_off_is_tried_again_and_leaves_nothing_half(
    machine: Callable[..., RemoteStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: int, arrives: bool
):
    machine().put(PACKET, "text")
    store, copy, left = machine("second"), remote_bucket._copy, iter(range(breaks))

    def breaking(found: Any, path: Path) -> int:
        if next(left, None) is None:
            return copy(found, path)
        path.write_bytes(b"half")
        raise remote_bucket._BrokenOffError("4 of 9 bytes came")

    monkeypatch.setattr(remote_bucket, "_copy", breaking)
    monkeypatch.setattr(remote_bucket, "_FIRST_PAUSE_SECONDS", 0.001)
    if arrives:
        assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)
    else:
        with pytest.raises(StoreError, match=r"broke off 3 times; .*4 of 9 bytes came"):
            store.get(PACKET.packet_id, SIGNATURE)
        assert PACKET.packet_id in store and len(store.tiers["disk"]) == 0
    assert files(tmp_path / "second" / "incoming") == []


def test_a_packet_whose_record_was_not_written_is_not_seen(
    machine: Callable[..., RemoteStore], monkeypatch: pytest.MonkeyPatch
):
    first, create = machine(), Bucket.create

    def killed(self: Bucket, key: str, parts: Any) -> bool:
        if key.startswith("chunks/"):
            raise StoreError("killed")
        return create(self, key, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "create", killed)
        with pytest.raises(StoreError, match="killed"):
            first.put(PACKET, "text", "owner")
    second = machine("second")
    assert all(PACKET.packet_id not in store and texts(store) == [] for store in (first, second))
    with pytest.raises(PacketNotFoundError):
        second.get(PACKET.packet_id, SIGNATURE)
    first.put(PACKET, "text", "owner")
    assert same(second.get(PACKET.packet_id, SIGNATURE), PACKET)


def test_a_damaged_record_is_not_believed_and_is_written_anew(machine: Callable[..., RemoteStore], objects: Path):
    machine().put(PACKET, "text")
    record = objects / "chunks" / f"{PACKET.packet_id}.json"
    record.write_bytes(record.read_bytes().replace(b'"text": "text"', b'"text": "test"'))
    second = machine("second")
    assert texts(second) == [] and second.metrics.snapshot().damaged_rows == 1
    second.put(PACKET, "text")
    assert texts(machine("third")) == ["text"]


@pytest.mark.parametrize(
    ("url", "environment", "told"),
    [
        ("s3://bucket/p", {"AWS_ACCESS_KEY_ID": "key"}, "no credentials.*set AWS_ACCESS_KEY_ID"),
        ("az://account/p", {}, "no credentials.*AZURE"),
        ("foo://bucket", {}, "names no object store.*expected s3://"),
        ("folder", {}, "is no URL"),
        ("s3://b/p", KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "does not answer.*check the network"),
    ],
)
def test_what_cannot_be_opened_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], told: str
):
    for name in (*KEYS, "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=told):
        RemoteStore(url, tmp_path / "cache", max_retries=1)
    assert not (tmp_path / "cache").exists()


def test_a_store_that_stays_away_is_not_asked_for_every_packet(monkeypatch: pytest.MonkeyPatch):
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    bucket = Bucket("s3://bucket/p", max_retries=1, pause_seconds=0.5)
    with pytest.raises(StoreError, match="does not answer"):
        bucket.read("a", 1000)
    with pytest.raises(StoreError, match="is asked again in"):
        bucket.read("a", 1000)
    time.sleep(0.6)
    with pytest.raises(StoreError, match="does not answer"):
        bucket.read("a", 1000)


@pytest.mark.parametrize(
    ("status", "told"),
    [(0, r"nothing came for 0\.5 s.*raise timeout_seconds"), (200, r"nothing came|answer"), (500, r"answer.* 500 ")],
)
def test_a_server_that_stalls_or_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, status: int, told: str):
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "900" if status == 200 else "0")
                self.end_headers()
            if status != 500:
                done.wait(30)

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}).items():
            monkeypatch.setenv(name, value)
        bucket = Bucket("s3://bucket/p", timeout_seconds=0.5, max_retries=1)
        with pytest.raises(StoreError, match=told):
            bucket.read("a", 1000)
        done.set()
        server.shutdown()


def test_without_obstore_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"kvpacket-rag\[remote\]"):
        RemoteStore("memory:///", tmp_path)


def test_nothing_is_cleared_away_through_a_link(machine: Callable[..., RemoteStore], tmp_path: Path):
    machine().close()
    incoming, foreign = tmp_path / "first" / "incoming", tmp_path / "foreign"
    incoming.rename(foreign)
    (foreign / "thesis").write_bytes(b"mine")
    os.utime(foreign / "thesis", (0, 0))
    incoming.symlink_to(foreign)
    with pytest.raises(StoreError, match=r"is a link or a file.*remove it"):
        machine()
    assert (foreign / "thesis").exists()
    incoming.unlink()
    incoming.write_bytes(b"")
    with pytest.raises(StoreError, match="is a link or a file"):
        machine()
