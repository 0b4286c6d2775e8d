"""Records made to harm in a bucket that others write to: left out and counted, and the rest is read as ever."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)

from kvpacket_rag.store import RemoteStore
from kvpacket_rag.store.remote_record import MAX_RECORD_BYTES, ChunkRecord

PACKET, OTHER = make_packet(1), "0" * 64


def record(packet_id: str = OTHER, **changes: Any) -> bytes:
    """A record that says such things, and is sealed."""
    values: dict[str, Any] = {"signature": SIGNATURE.to_json(), "text": "other", "num_tokens": 5, "stored_ns": 1}
    return ChunkRecord(packet_id, **values | changes).to_json()


HOSTILE = {
    "num_tokens": record(num_tokens=10**30),
    "negative": record(num_tokens=-1),
    "boolean": record(num_tokens=True),
    "mapping": record(num_tokens={"a": 1}),
    "text as number": record(num_tokens="5"),
    "no time": record(stored_ns=None),
    "lone surrogate": record(text="\ud800"),
    "no signature": record(signature="x"),
    "deep signature": record(signature="[" * 100_000),
    "deep": b"[" * 200_000,
    "long number": b'{"packet_id":' + b"1" * 5000 + b"}",
    "list": json.dumps([1]).encode(),
    "long": record(text="x" * MAX_RECORD_BYTES),
}


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """The URL of a bucket with one packet."""
    url = f"file://{tmp_path}/objects"
    RemoteStore(url, tmp_path / "writer").put(PACKET, "text", "owner")
    return url


def reads_the_rest(url: str, cache: Path) -> None:
    with_harm = RemoteStore(url, cache)
    assert [chunk.text for chunk in with_harm.known(SIGNATURE)] == ["text"]
    assert same(with_harm.get(PACKET.packet_id, SIGNATURE), PACKET)
    assert with_harm.metrics.snapshot().damaged_rows == 1


def test_a_record_that_is_as_it_should_be_is_read(bucket: str, tmp_path: Path):
    (tmp_path / "objects" / "chunks" / f"{OTHER}.json").write_bytes(record())
    assert {chunk.text for chunk in RemoteStore(bucket, tmp_path / "reader").known(SIGNATURE)} == {"text", "other"}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_record_made_to_harm_is_left_out(bucket: str, tmp_path: Path, content: bytes):
    (tmp_path / "objects" / "chunks" / f"{OTHER}.json").write_bytes(content)
    reads_the_rest(bucket, tmp_path / "reader")


def test_the_record_of_what_is_no_packet_is_left_out(bucket: str, tmp_path: Path):
    (tmp_path / "objects" / "chunks" / "evil.json").write_bytes(record("evil"))
    reads_the_rest(bucket, tmp_path / "reader")


def test_a_huge_record_is_not_taken_into_memory(bucket: str, tmp_path: Path):
    path = tmp_path / "objects" / "chunks" / f"{OTHER}.json"
    path.touch()
    os.truncate(path, 1 << 40)  # takes no room on the disk, and would take more memory than there is
    reads_the_rest(bucket, tmp_path / "reader")
