"""What killed processes left is put right when a store is opened, and nothing else is touched."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from test_store import SIGNATURE, closing, make_packet, same  # noqa: F401 (closing is a fixture)
from test_store_disk import files, root  # noqa: F401 (root is a fixture)

from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore
from kvpacket_rag.store import upkeep as upkeep_module


def test_leftovers_are_swept_at_opening_and_what_is_not_the_stores_is_left_alone(root: Path) -> None:  # noqa: F811
    store = DiskStore(root)
    store.put(make_packet(1), "text")
    (kept,) = files(root)
    temporary, misplaced = kept.with_name(f".{'0' * 64}.{'1' * 16}.tmp"), kept.with_name(f"{'0' * 64}.safetensors")
    orphan = root / "packets" / "00" / misplaced.name
    aside, foreign = root / "quarantine" / kept.name, kept.with_name("notes.txt")
    for path in (temporary, misplaced, orphan, aside, foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left by a killed process")
    store.close()
    again = DiskStore(root)
    assert set(files(root)) == {kept, foreign} and len(again) == 1
    assert not again.state().disorder and abs((again.state().last_sweep or 0) - time.time()) < 60


def test_a_file_that_a_writer_is_at_is_not_swept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(upkeep_module, "_SWEEP_WAIT_SECONDS", 0.0)
    store, replace_file = DiskStore(root), os.replace

    def replacing(source: Path, target: Path) -> None:
        DiskStore(root)  # another process opens the store while the file is there and its row is not
        replace_file(source, target)
        DiskStore(root)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replacing)
        store.put(make_packet(1), "text")
    assert same(store.get(packet_id([1], SIGNATURE), SIGNATURE), make_packet(1))


def test_a_row_whose_file_is_gone_is_put_right_at_opening(root: Path) -> None:  # noqa: F811
    store = DiskStore(root)
    store.put(make_packet(1), "text", "owner")
    files(root)[0].unlink()
    again = DiskStore(root)
    assert (len(again), again.size_bytes, len(list(again.known(SIGNATURE)))) == (0, 0, 1)
