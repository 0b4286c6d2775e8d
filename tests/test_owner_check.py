"""``kvpacket check`` compares who owns packets with the rows of the index beside them."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401
from conftest import CHUNKS
from pipeline_samples import NEW_LEASE
from test_cli_check import found_by, statement
from test_store import make_packet

from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.owner_check import check_owners, knows_none
from kvpacket_rag.owners import owner_names
from kvpacket_rag.ownership import Ownership
from kvpacket_rag.store import DiskStore
from kvpacket_rag.store.owned import ownerships

OTHERS = ("langchain/intro.md", "0.txt", "another:0")


def texts_of(index: Path) -> set[str]:
    with closing(DiskStore(index)) as store:
        return {text for _, _, text, _, _ in store._catalogue.rows()}


def faults_of(found: dict[str, Any]) -> tuple[int, int]:
    return found["packets_of_chunks_that_are_gone"], found["chunks_not_owning_their_packet"]


def test_a_sound_folder_is_in_step(kv: Run, index: Path) -> None:
    code, found = found_by(kv, index)
    assert (code, faults_of(found)) == (0, (0, 0))


def test_an_index_of_yesterday_beside_the_packets_of_today_is_told_and_repaired(
    kv: Run, index: Path, docs: Path, tmp_path: Path
) -> None:
    shutil.copy(index / "index.sqlite", tmp_path / "yesterday.sqlite")
    (docs / "0.txt").write_text(NEW_LEASE)
    assert kv("ingest", docs, "--index", index)[0] == 0 and NEW_LEASE in texts_of(index)
    shutil.copy(tmp_path / "yesterday.sqlite", index / "index.sqlite")
    code, found = found_by(kv, index)
    assert (code, faults_of(found), found["chunks_without_packet"]) == (3, (1, 0), 1) and NEW_LEASE in texts_of(index)
    code, found = found_by(kv, index, "--repair")
    assert (code, faults_of(found)) == (0, (1, 0)) and NEW_LEASE not in texts_of(index)
    assert faults_of(found_by(kv, index)[1]) == (0, 0) and len(texts_of(index)) == 3


def test_rows_that_lost_their_packets_own_them_again_and_these_go_with_them(kv: Run, index: Path) -> None:
    statement(index / "packets.sqlite", "DELETE FROM owners WHERE owner LIKE '%0.txt%'")
    code, found = found_by(kv, index)
    assert (code, faults_of(found)) == (3, (0, 1)) and "--repair" in found["verdict"]
    assert found_by(kv, index, "--repair")[0] == 0
    assert faults_of(found_by(kv, index)[1]) == (0, 0)
    with closing(PacketIndex.open(index)) as opened:
        document = next(name for name in opened.documents() if "0.txt" in name)
    assert kv("delete", document, "--index", index)[0] == 0
    assert CHUNKS[0] not in texts_of(index) and len(texts_of(index)) == 3


def test_others_owners_are_left_alone(kv: Run, index: Path) -> None:
    with closing(DiskStore(index)) as store:
        packet_id = sorted(ownerships(store))[0][0]
        for owner in OTHERS:
            store.add_owner(packet_id, owner)
        store.add_owner(packet_id, ":gone")
    assert faults_of(found_by(kv, index)[1]) == (1, 0)
    assert found_by(kv, index, "--repair")[0] == 0
    with closing(DiskStore(index)) as store:
        left = {owner for name, owner in ownerships(store) if name == packet_id}
    assert left >= set(OTHERS) and ":gone" not in left and len(left) == len(OTHERS) + 1


def test_where_rows_own_by_their_bare_ids_no_owner_is_said_to_be_without_a_row(kv: Run, index: Path) -> None:
    with closing(PacketIndex.open(index)) as opened, closing(DiskStore(index)) as store:
        named = owner_names(opened, store, (chunk.chunk_id for chunk, _ in opened.rows()))
        opened.set_setting("owner_prefix_in_folder", "")
        rows = {chunk.chunk_id: packet_id for chunk, packet_id in opened.rows()}
        for chunk_id, packet_id in list(rows.items())[1:]:
            store.add_owner(packet_id, chunk_id)
        store.add_owner(next(iter(rows.values())), "another")
        store.drop_owners(named)
    code, found = found_by(kv, index)
    assert (code, faults_of(found)) == (3, (0, 1))
    assert found_by(kv, index, "--repair")[0] == 0 and len(texts_of(index)) == 4
    with closing(DiskStore(index)) as store:
        assert {owner for _, owner in ownerships(store)} == {*rows, "another"}


def test_what_is_being_changed_is_no_fault(index: Path) -> None:
    with closing(PacketIndex.open(index)) as opened, closing(DiskStore(index)) as store:
        (chunk, packet_id), *_ = opened.rows()
        OwnerJournal(opened, store).note({"new": ["new:0"]})
        for owner in (":new:0", ":newer\n(changing)"):
            store.add_owner(packet_id, owner)
        assert not check_owners(opened, store).rowless
        store.add_owner(packet_id, f":{chunk.chunk_id}\n(changing)")
        store.drop_owners([f":{chunk.chunk_id}"])
        assert not check_owners(opened, store).unowned


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_index_whose_packets_lie_elsewhere_owns_none_here(index: Path, elsewhere: bool) -> None:
    with closing(PacketIndex.open(index)) as opened, closing(DiskStore(index)) as store:
        if elsewhere:
            opened.set_setting("owner_prefix_elsewhere", "name/")
        for packet_id, owner in ownerships(store):
            store.add_owner(packet_id, "langchain/intro.md")
            store.drop_owners([owner])
        assert len(check_owners(opened, store).unowned) == (0 if elsewhere else 4)


def test_an_index_without_any_packet_is_not_well_until_it_is_encoded_again(kv: Run, index: Path) -> None:
    shutil.rmtree(index / "packets")
    (index / "packets.sqlite").unlink()
    for options in ([], ["--repair"]):
        code, found = found_by(kv, index, *options)
        assert (code, found["chunks_without_packet"]) == (3, 4) and "no packet is left" in found["verdict"]
    assert found["verdict"].endswith(f"'kvpacket ingest --index {index} --reencode'")
    assert kv("ingest", "--index", index, "--reencode")[0] == 0
    code, found = found_by(kv, index)
    assert (code, found["verdict"], found["packets_whole"]) == (0, "all is well", 4)


def test_packets_that_are_encoded_again_when_asked_for_are_no_fault(kv: Run, index: Path) -> None:
    shutil.rmtree(index / "packets")
    assert found_by(kv, index)[0] == 3
    assert found_by(kv, index, "--repair")[0] == 0
    code, found = found_by(kv, index)
    assert (code, found["verdict"], found["chunks_without_packet"]) == (0, "all is well", 4)


def test_an_index_whose_packets_never_lay_beside_it_is_well(index: Path) -> None:
    with closing(PacketIndex.open(index)) as opened, closing(DiskStore(index)) as store:
        for packet_id, _ in ownerships(store):
            store.delete(packet_id)
        assert knows_none(opened, store)
        opened.set_setting("owner_prefix_elsewhere", "name/")
        assert not knows_none(opened, store)


@pytest.mark.parametrize("way", ["delete", "repair"])
def test_what_a_killed_change_kept_goes_with_the_next_deletion_or_repair(kv: Run, index: Path, way: str) -> None:
    """A packet that was kept for a row that never came, under a name that is only used meanwhile."""
    with closing(PacketIndex.open(index)) as opened, closing(DiskStore(index)) as store:
        ownership = Ownership(opened, store, lambda chunk: chunk.chunk_id, None)
        ownership._note(["new"])
        store.put(make_packet(1), "never came", *ownership._guards(["new"]))
        document = opened.documents()[0]
    code, found = found_by(kv, index)
    assert (code, found["chunks_half_changed"]) == (3, ["new"]) and "never came" in texts_of(index)
    if way == "delete":
        assert kv("delete", document, "--index", index)[0] == 0
    else:
        assert found_by(kv, index, "--repair")[0] == 0
    assert "never came" not in texts_of(index) and len(texts_of(index)) == 4 - (way == "delete")
    assert found_by(kv, index)[0] == 0
