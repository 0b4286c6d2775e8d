"""A bucket that is reachable and empty, as a share that is not mounted: nothing that is kept near by is forgotten."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, kv_fixture, tiny_fixture  # noqa: F401 (fixtures)
from pipeline_samples import packet_files
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)
from test_store_remote import PACKET, file_of, files, machine_fixture, objects_fixture, texts  # noqa: F401 (fixtures)

from kvpacket_rag.errors import PacketNotFoundError, StoreError
from kvpacket_rag.store import RemoteStore
from kvpacket_rag.store.remote_bucket import Bucket
from kvpacket_rag.store.remote_mark import MARK

OTHER = make_packet(2)
Machine = Callable[..., RemoteStore]


def unmount(objects: Path) -> Path:
    """Leave an empty folder where the share was; returns where its content is."""
    away = objects.with_name("away")
    objects.rename(away)
    objects.mkdir()
    return away


def mount(objects: Path, away: Path) -> None:
    shutil.rmtree(objects)
    away.rename(objects)


def test_a_share_that_is_not_mounted_is_refused_and_nothing_is_forgotten(machine: Machine, objects: Path):
    machine().put(PACKET, "text", "owner")
    away = unmount(objects)
    with pytest.raises(StoreError, match=rf"{objects} is empty.*not be mounted.*delete packets\.sqlite"):
        machine()
    assert files(objects) == []
    mount(objects, away)
    store = machine()
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET) and store.metrics.snapshot().loads == 0


def test_no_command_deletes_what_is_kept_of_a_share_that_is_not_mounted(
    kv: Run, docs: Path, tmp_path: Path, objects: Path
):
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index, "--remote", f"file://{objects}")[0] == 0
    away = unmount(objects)
    for command in (["check", index], ["ask", "Who?", "--index", index], ["check", index, "--repair"]):
        code, _, err = kv(*command)
        assert (code, len(packet_files(index)), files(objects)) == (1, 4, []) and "may not be mounted" in err
    mount(objects, away)
    code, out, _ = kv("ask", "Who?", "--index", index, "--max-new-tokens", 2)
    assert code == 0 and "4 chunks" in out


def test_the_deletion_of_the_last_packet_is_followed(machine: Machine, objects: Path):
    first, second = machine(), machine("second")
    first.put(PACKET, "text", "owner")
    second.refresh()
    assert texts(second) == ["text"]
    first.drop_owners(["owner"])
    second.refresh()
    assert texts(second) == texts(machine("third")) == [] and files(objects) == [objects / MARK]


def test_a_running_store_goes_on_without_its_share(machine: Machine, objects: Path, caplog: pytest.LogCaptureFixture):
    machine().put(OTHER, "other", "owner")
    store = machine("second", refresh_seconds=0.0)
    store.put(PACKET, "text", "owner")
    away = unmount(objects)
    store.revision()
    deadline = time.monotonic() + 30
    while "may not be mounted" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "looked for later" in caplog.text and texts(store) == ["other", "text"]
    assert same(store.get(PACKET.packet_id, SIGNATURE), PACKET)
    for act, given in ((store.get, (OTHER.packet_id, SIGNATURE)), (store.drop_owners, [["owner"]])):
        with pytest.raises(StoreError, match="may not be mounted"):
            act(*given)
    with pytest.raises(StoreError, match="may not be mounted"):
        store.delete(OTHER.packet_id)
    assert OTHER.packet_id in store and store.metrics.snapshot().misses == {"unreadable": 1}
    mount(objects, away)
    assert same(store.get(OTHER.packet_id, SIGNATURE), OTHER)


def test_what_was_put_where_the_share_was_not_mounted_hides_nothing(machine: Machine, objects: Path):
    store = machine()
    store.put(PACKET, "text", "owner")
    unmount(objects)
    store.put(OTHER, "other", "owner")
    with pytest.raises(StoreError, match="may not be mounted"):
        machine()
    assert not (objects / MARK).exists() and texts(store) == ["text", "other"]


@pytest.mark.parametrize("may_write", [True, False])
def test_a_bucket_of_an_older_version_is_marked_where_that_is_allowed(
    machine: Machine, objects: Path, monkeypatch: pytest.MonkeyPatch, may_write: bool
):
    for packet in (PACKET, OTHER):
        machine().put(packet, "text", "owner")
    (objects / MARK).unlink()
    create = Bucket.create

    def refusing(self: Bucket, key: str, parts: Any) -> bool:
        if not may_write:
            raise StoreError("the credentials do not allow it")
        return create(self, key, parts)

    monkeypatch.setattr(Bucket, "create", refusing)
    for packet in (OTHER, PACKET):  # the one is deleted meanwhile
        assert same(machine("reader").get(packet.packet_id, SIGNATURE), packet)
        (objects / "chunks" / f"{OTHER.packet_id}.json").unlink(missing_ok=True)
        assert (objects / MARK).exists() == may_write
    unmount(objects)
    with pytest.raises(StoreError, match="may not be mounted"):
        machine("reader")


def test_a_mark_that_somebody_deleted_comes_back_while_nothing_else_is_missing(machine: Machine, objects: Path):
    store = machine()
    for packet in (PACKET, OTHER):
        store.put(packet, "text", "owner")
    (objects / MARK).unlink()
    machine()
    assert (objects / MARK).exists()
    (objects / MARK).unlink()
    file_of(objects).unlink()
    (objects / "chunks" / f"{PACKET.packet_id}.json").unlink()
    with pytest.raises(StoreError, match="not the one into which the packets were put"):
        machine()
    assert len(store) == 2


def test_opening_marks_no_empty_bucket_nor_one_that_is_only_looked_at(machine: Machine, objects: Path):
    machine("new")
    assert files(objects) == []
    machine().put(PACKET, "text", "owner")
    (objects / MARK).unlink()
    assert texts(machine("looking", create=False)) == ["text"] and not (objects / MARK).exists()


def test_the_mark_is_no_packet(machine: Machine, objects: Path):
    store = machine()
    store.put(PACKET, "text", "owner")
    assert store.size_bytes == file_of(objects).stat().st_size and len(store) == len(machine("second")) == 1
    file_of(objects).unlink()
    with pytest.raises(PacketNotFoundError, match="gone from"):
        machine("third").get(PACKET.packet_id, SIGNATURE)
