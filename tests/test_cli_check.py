"""``kvpacket check`` finds what is wrong with a folder, says so by its exit code, and puts it right."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401

from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.journal import OwnerJournal
from kvpacket_rag.namespace import namespace_folder
from kvpacket_rag.store import DiskStore


def harm_packet(index: Path) -> str:
    file = sorted((index / "packets").rglob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    return file.stem


def statement(path: Path, sql: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(sql)
    connection.close()


def found_by(kv: Run, index: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code, out, err = kv("check", index, "--json", *options)
    assert out, err
    return code, json.loads(out)


def test_a_sound_index_is_told_so_without_loading_a_model(kv: Run, index: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(KVPacketEngine, "load", lambda *_, **__: pytest.fail("loaded a model"))
    code, out, _ = kv("check", index)
    assert code == 0 and "all is well" in out and ["packets", "whole", "4"] in map(str.split, out.splitlines())


def test_how_far_verifying_is_is_told_up_to_the_last_byte(index: Path) -> None:
    told: list[tuple[int, int]] = []
    with contextlib.closing(DiskStore(index)) as store:
        found = store.check(progress=lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [found.bytes_read] * 4
    assert [done for done, _ in told] == sorted({done for done, _ in told}) and told[-1][0] == found.bytes_read


def test_what_is_wrong_is_listed_and_repaired(kv: Run, index: Path, docs: Path) -> None:
    damaged = harm_packet(index)
    orphan = index / "packets" / "00" / f"{'0' * 64}.safetensors"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"left over")
    statement(index / "packets.sqlite", "UPDATE totals SET size_bytes = 7")
    statement(index / "index.sqlite", "UPDATE chunks SET text = 'forged' WHERE seq = 2")
    code, found = found_by(kv, index)
    assert code == 3 and list(found["damaged_packets"]) == [damaged] and "checksum" in found["damaged_packets"][damaged]
    assert (found["files_without_row"], found["wrong_counts"], found["packets_whole"]) == (1, True, 3)
    assert len(found["damaged_rows_of_index"]) == 1 and orphan.exists() and "--repair" in found["verdict"]
    assert found_by(kv, index, "--repair")[0] == 0 and not orphan.exists()
    code, found = found_by(kv, index)
    assert (code, found["verdict"]) == (0, "all is well")
    assert kv("ingest", docs, "--index", index)[0] == 0
    assert found_by(kv, index)[1]["packets_whole"] >= 3


def test_damaged_vectors_are_found_and_their_documents_taken_out(
    kv: Run, index: Path, docs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    statement(index / "index.sqlite", "UPDATE vectors SET vector = zeroblob(LENGTH(vector)) WHERE seq = 3")
    statement(index / "index.sqlite", "DELETE FROM vectors WHERE seq = 1")
    assert kv("ask", "Who signed?", "--index", index)[0] == 0
    assert "2 chunks are damaged and passed over; 'kvpacket check DIR --repair'" in caplog.text
    code, found = found_by(kv, index)
    assert code == 3 and len(found["damaged_rows_of_index"]) == 2
    assert found_by(kv, index, "--repair")[0] == 0
    assert kv("ingest", docs, "--index", index)[0] == 0
    code, found = found_by(kv, index)
    assert (code, found["packets_whole"], found["chunks_without_packet"]) == (0, 4, 0)


def test_damaged_rows_of_packets_are_taken_out(kv: Run, index: Path) -> None:
    statement(index / "packets.sqlite", "UPDATE packets SET text = 'forged' WHERE number = 1")
    code, found = found_by(kv, index)
    assert code == 3 and len(found["damaged_rows_of_packets"]) == 1
    assert found_by(kv, index, "--repair")[0] == 0
    code, found = found_by(kv, index)
    assert code == 0 and found["packets_whole"] == 3 and found["chunks_without_packet"] == 1


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE vectors SET seq = 99 WHERE seq = 2",
        "UPDATE chunks SET seq = 99 WHERE seq = 2",
        "DELETE FROM chunks WHERE seq = 2",
        "UPDATE chunks SET chunk_id = CAST(x'6380' AS TEXT) WHERE seq = 2",
        "UPDATE chunks SET chunk_id = CAST(chunk_id AS BLOB) WHERE seq = 2",
        "UPDATE chunks SET document_id = CAST(x'6480' AS TEXT) WHERE seq = 2",
        "UPDATE chunks SET packet_id = CAST(packet_id AS BLOB) WHERE seq = 2",
    ],
)
def test_what_is_repaired_opens_and_can_be_ingested_again(kv: Run, index: Path, docs: Path, sql: str) -> None:
    statement(index / "index.sqlite", sql)
    assert found_by(kv, index)[0] == 3
    assert found_by(kv, index, "--repair")[0] == 0
    assert found_by(kv, index)[1]["verdict"] == "all is well"
    PacketIndex.open(index).close()
    assert kv("ingest", docs, "--index", index)[0] == 0
    assert found_by(kv, index)[1]["verdict"] == "all is well"


def test_a_lost_row_of_a_damaged_document_id_comes_back_with_the_next_ingest(kv: Run, index: Path, docs: Path) -> None:
    def texts() -> list[str]:
        with contextlib.closing(PacketIndex.open(index)) as opened:
            return sorted(chunk.text for chunk, _ in opened.rows())

    (docs / "long.txt").write_text("\n\n".join(f"The gate {n} is closed at {n} o'clock by hand." for n in range(400)))
    assert kv("ingest", docs, "--index", index)[0] == 0
    before = texts()
    last = "(SELECT MAX(seq) FROM chunks)"
    statement(index / "index.sqlite", f"UPDATE chunks SET document_id = 'another' WHERE seq = {last}")
    assert found_by(kv, index, "--repair")[0] == 0 and len(texts()) < len(before)
    assert kv("ingest", docs, "--index", index)[0] == 0
    assert texts() == before


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE chunks SET document_id = 'another' WHERE seq = 6",
        "DELETE FROM chunks WHERE seq = 6",
        "UPDATE vectors SET checksum = 1 WHERE seq = 6; UPDATE chunks SET document_id = 'another' WHERE seq = 6",
    ],
)
def test_a_repair_cut_short_after_any_step_loses_no_chunk(
    kv: Run, index: Path, docs: Path, tmp_path: Path, monkeypatch: Any, harm: str
) -> None:
    (docs / "long.txt").write_text("\n\n".join(f"The gate {n} is closed at {n} o'clock by hand." for n in range(200)))
    assert kv("ingest", docs, "--index", index)[0] == 0
    with contextlib.closing(PacketIndex.open(index)) as opened:
        before = sorted(chunk.text for chunk, _ in opened.rows())
    assert len(before) > 6
    steps = [(PacketIndex, "mend"), (OwnerJournal, "settle"), (PacketIndex, "delete"), (DiskStore, "drop_owners")]
    steps += [(PacketIndex, "drop_damaged"), (PacketIndex, "compact"), (DiskStore, "check")]
    cut: list[str] = []
    for kind, name in steps:
        folder = tmp_path / name
        shutil.copytree(index, folder)
        for sql in harm.split("; "):
            statement(folder / "index.sqlite", sql)
        real = getattr(kind, name)

        def short(*given: Any, real: Any = real, name: str = name, **options: Any) -> None:
            real(*given, **options)
            cut.append(name)
            raise OSError("cut short")

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, short)
            kv("check", folder, "--repair")
        assert found_by(kv, folder, "--repair")[0] == 0
        assert kv("ingest", docs, "--index", folder)[0] == 0
        with contextlib.closing(PacketIndex.open(folder)) as opened:
            assert sorted(chunk.text for chunk, _ in opened.rows()) == before, name
    assert cut[0] == "mend" and {"drop_damaged", "check"} <= set(cut)


@pytest.mark.parametrize("changed", ["CAST(packet_id AS BLOB)", "CAST(x'80' || substr(packet_id, 2) AS TEXT)", "'x'"])
def test_rows_of_packets_without_an_id_are_taken_out(kv: Run, index: Path, changed: str) -> None:
    statement(index / "packets.sqlite", f"UPDATE packets SET packet_id = {changed} WHERE number = 2")
    assert found_by(kv, index)[0] == 3
    assert found_by(kv, index, "--repair")[0] == 0
    assert found_by(kv, index)[1]["verdict"] == "all is well"


def test_a_folder_of_packets_alone_is_checked(kv: Run, index: Path) -> None:
    (index / "index.sqlite").unlink()
    assert kv("check", index)[0] == 0
    harm_packet(index)
    code, out, _ = kv("check", index)
    assert code == 3 and "damaged packets" in out


def test_a_folder_of_neither_is_an_error(kv: Run, tmp_path: Path) -> None:
    code, _, err = kv("check", tmp_path)
    assert code == 1 and "neither an index nor packets" in err


def test_inspect_shows_leftovers_and_the_last_sweep(kv: Run, index: Path) -> None:
    stray = index / "packets" / "00" / f".{'0' * 64}.{'1' * 16}.tmp"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"left over")
    found = json.loads(kv("inspect", index, "--json")[1])
    assert found["files_without_row"] == 1 and found["last_sweep"] != "never" and stray.exists()
    packets = sum(path.stat().st_size for path in (index / "packets").rglob("*.safetensors"))
    assert found["bytes_by_tier"] == {"disk": packets}
    assert "bytes by tier" in kv("inspect", index)[1]
    assert found["bytes_of_catalogue"] > 0 and found["packets_evicted"] == found["rows_without_file"] == 0


@pytest.mark.parametrize("with_root", [True, False])
def test_namespaces_are_checked_and_repaired_too(kv: Run, index: Path, tmp_path: Path, with_root: bool) -> None:
    folder = tmp_path / "all"
    for place in (namespace_folder(folder, "ann"), namespace_folder(folder, "bob"), *([folder] * with_root)):
        shutil.copytree(index, place, dirs_exist_ok=True)
    bob = namespace_folder(folder, "bob")
    damaged = harm_packet(bob)
    code, found = found_by(kv, folder)
    assert code == 3 and list(found["namespaces"][bob.name]["damaged_packets"]) == [damaged]
    sound = [found["namespaces"][namespace_folder(folder, "ann").name], *([found] * with_root)]
    assert {each["verdict"] for each in sound} == {"all is well"} and ("verdict" in found) == with_root
    code, out, _ = kv("check", folder, "--repair")
    assert code == 0 and f"{bob}:" in out
    assert found_by(kv, folder)[0] == 0


@pytest.mark.parametrize("linked", ["namespaces", "namespaces/evil"])
def test_links_in_place_of_namespaces_are_told_and_what_they_lead_to_is_left_alone(
    kv: Run, index: Path, tmp_path: Path, linked: str
) -> None:
    others = tmp_path / "others"
    shutil.copytree(index, others / "evil")
    damaged = harm_packet(others / "evil")
    (index / linked).parent.mkdir(exist_ok=True)
    (index / linked).symlink_to(others if linked == "namespaces" else others / "evil")
    before = sorted(others.rglob("*"))
    for options in ([], ["--repair"]):
        code, found = found_by(kv, index, *options)
        assert (code, found["links_left_alone"]) == (3, [str(index / linked)]) and "namespaces" not in found
        assert found["verdict"] == "all is well"
    assert f"{index / linked} is a link, left alone" in kv("check", index)[2]
    assert sorted(others.rglob("*")) == before and damaged in {path.stem for path in before}
