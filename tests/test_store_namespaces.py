"""Tenants that share a folder share nothing else, even where their texts are equal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNKS
from test_store import SIGNATURE, closing, make_packet, stored_bytes  # noqa: F401 (closing is a fixture)

from kvpacket_rag.chunk import Chunk
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import PacketNotFoundError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.packet import packet_id
from kvpacket_rag.store import DiskStore

NAMES = ["", "a", "A", "a/b", "a-b", "../a", "..", "ä", "a ", "a.", "con", "A" * 256]


def test_packets_texts_and_counts_of_one_namespace_are_unknown_to_the_others(tmp_path: Path) -> None:
    stores = [DiskStore(tmp_path, namespace=name) for name in NAMES]
    for seed, store in enumerate(stores):
        store.put(make_packet(seed), f"text {seed}", "owner")
    for seed, store in enumerate(stores):
        assert [chunk.text for chunk in store.known(SIGNATURE)] == [f"text {seed}"] and len(store) == 1
        with pytest.raises(PacketNotFoundError):
            store.get(packet_id([(seed + 1) % len(NAMES)], SIGNATURE), SIGNATURE)
    assert stores[0].drop_owners(["owner"]) == [packet_id([0], SIGNATURE)]
    assert [len(store) for store in stores] == [0] + [1] * (len(NAMES) - 1)


def test_hits_never_cross(tmp_path: Path) -> None:
    indexes = [PacketIndex.open(tmp_path, namespace=name) for name in ("", "one", "two")]
    for number, index in enumerate(indexes):
        index.add([Chunk("c", f"text {number}")], np.eye(1, 4), ["p"])
    assert [index.search([1, 0, 0, 0], 9)[0].chunk.text for index in indexes] == ["text 0", "text 1", "text 2"]
    for index in indexes:
        assert len(index) == 1
        index.close()


def test_an_equal_text_in_a_prompt_does_not_reach_another_tenants_packet(backbone: Any, tmp_path: Path) -> None:
    mine, theirs = (
        KVPacketEngine(backbone, DiskStore(tmp_path, namespace=name), min_match_tokens=4) for name in ("me", "they")
    )
    theirs.encode(CHUNKS)
    prompt = f"{CHUNKS[0]}\n\nWhat is kept cold?"
    assert theirs.generate(prompt).usage.chunks_reused == 1
    assert mine.generate(prompt).usage.chunks_reused == 0 and len(mine.store) == 0
    mine.encode(CHUNKS[:1])  # the cost: encoded and stored once more
    assert mine.generate(prompt).usage.chunks_reused == 1 and len(mine.store) == 1


def test_each_namespace_has_a_cap_of_its_own(tmp_path: Path) -> None:
    cap = 2 * stored_bytes("disk", make_packet(0))
    one, other = (DiskStore(tmp_path, cap, namespace=name) for name in ("one", "other"))
    for seed in range(3):
        one.put(make_packet(seed), "text")
    other.put(make_packet(0), "text")
    assert (len(one), len(other)) == (2, 1)


@pytest.mark.parametrize("name", ["a" * 257, "a\0b", "a\nb"])
def test_a_name_no_folder_can_stand_for_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="namespace"):
        namespace_folder(tmp_path, name)


def test_a_link_in_place_of_a_namespace_or_of_all_is_refused(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for link in (namespace_folder(folder, "me"), folder / "namespaces"):
        outside.mkdir(exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        for use in (DiskStore, PacketIndex.open):
            with pytest.raises(StoreError, match="is a link"):
                use(folder, namespace="me")
        DiskStore(folder).close()
        assert not list(outside.iterdir())
        shutil.rmtree(folder)
