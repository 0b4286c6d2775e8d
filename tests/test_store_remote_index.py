"""An index whose packets lie in an object store: several machines, namespaces, and the command line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from cli_samples import Run, docs_fixture, kv_fixture, tiny_fixture  # noqa: F401 (fixtures)
from pipeline_samples import documents, encoded_texts, packet_files

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.errors import StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.pipeline import KVPacketRAG

SHORT = GenerationSettings(max_new_tokens=2)
QUESTION = "Who signed the lease of the harbour office?"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/objects"


def objects(tmp_path: Path, kind: str = "packets") -> list[Path]:
    return [path for path in (tmp_path / "objects").rglob("*") if path.is_file() and kind in path.parts]


def copied(folder: Path, target: Path) -> Path:
    """The index as it is brought to another machine: all but the packets."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("packets", "incoming")))


def test_a_machine_with_a_copy_of_the_rows_answers_from_the_same_packets(tiny: None, tmp_path: Path, url: str):
    with KVPacketRAG.open(tmp_path / "first", remote=url) as rag:
        assert rag.add(documents()).packets_encoded == len(objects(tmp_path)) == 4
        expected = rag.ask(QUESTION, settings=SHORT).answer
    assert expected.usage.chunks_reused == 4
    with KVPacketRAG.open(copied(tmp_path / "first", tmp_path / "second"), cache_bytes=50_000) as rag:
        seen = encoded_texts(rag)
        for _ in range(2):
            answer = rag.ask(QUESTION, settings=SHORT).answer
            assert (answer.text, answer.usage.chunks_reused) == (expected.text, 4)
        assert seen == [] and 0 < rag.engine.store.tiers["disk"].size_bytes <= 50_000


def test_encoding_one_index_again_leaves_the_packets_of_another(tiny: None, tmp_path: Path, url: str, adapter: Adapter):
    for name in ("one", "other"):
        with KVPacketRAG.open(tmp_path / name, remote=url) as rag:
            rag.add(documents())
    with KVPacketRAG.open(tmp_path / "one", adapter=adapter, reencode=True) as rag:
        assert rag.reencoded is not None and rag.reencoded.packets_encoded == 4 and len(objects(tmp_path)) == 8
    with KVPacketRAG.open(tmp_path / "other") as rag:
        seen = encoded_texts(rag)
        assert rag.ask(QUESTION, settings=SHORT).answer.usage.chunks_reused == 4 and seen == []
    with KVPacketRAG.open(tmp_path / "other", adapter=adapter, reencode=True):
        assert len(objects(tmp_path)) == 4


def test_an_index_on_disk_is_moved_into_the_object_store(tiny: None, tmp_path: Path, url: str):
    with KVPacketRAG.open(tmp_path / "index") as rag:
        rag.add(documents())
    with KVPacketRAG.open(tmp_path / "index", remote=url) as rag:
        seen = encoded_texts(rag)
        assert rag.add(documents()).unchanged == 4 and seen == []
        assert packet_files(tmp_path / "index") == {path.stem for path in objects(tmp_path)} != set()
        rag.delete("d0")
        assert len(objects(tmp_path)) == 3
    with pytest.raises(StoreError, match="name another folder"):
        KVPacketRAG.open(tmp_path / "index", remote=f"file://{tmp_path}/elsewhere")


def test_namespaces_lie_apart_in_the_object_store(tiny: None, tmp_path: Path, url: str):
    for name in ("ann", "bob"):
        with KVPacketRAG.open(tmp_path / "index", remote=url, namespace=name) as rag:
            assert rag.add(documents()).packets_encoded == 4
        with KVPacketRAG.open(tmp_path / "index", namespace=name) as rag:
            assert rag.engine.store.url.startswith(f"{url}/namespaces/{name}-")
    assert len(objects(tmp_path)) == 8


def test_the_command_line_ingests_asks_and_deletes(kv: Run, docs: Path, tmp_path: Path, url: str):
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index, "--remote", url, "--cache-bytes", 10**6)[0] == 0
    assert len(objects(tmp_path)) == 4
    other = copied(index, tmp_path / "other")
    code, out, _ = kv("ask", QUESTION, "--index", other, "--max-new-tokens", 2)
    assert code == 0 and "4 chunks" in out
    assert kv("delete", docs / "0.txt", "--index", index)[0] == 0
    assert len(objects(tmp_path)) == len(objects(tmp_path, "chunks")) == len(objects(tmp_path, "owned")) == 3
    assert url in kv("inspect", index)[1]


def test_without_the_object_store_answers_come_from_text_and_say_so(tiny: None, tmp_path: Path, url: str):
    with KVPacketRAG.open(tmp_path / "first", remote=url) as rag:
        rag.add(documents())
    with KVPacketRAG.open(copied(tmp_path / "first", tmp_path / "second")) as rag:
        shutil.rmtree(tmp_path / "objects")
        answer = rag.ask(QUESTION, settings=SHORT).answer
        assert answer.usage.chunks_reused == 0 and len(answer.usage.misses) == 4


def test_the_frameworks_take_a_url_for_what_it_is(url: str):
    from langchain_kvpacket import ChatKVPacket
    from llama_index_kvpacket.loading import resolve

    for place, meant in ((url, url), ("folder", str(Path("folder").absolute()))):
        assert ChatKVPacket(store=place).store == resolve({"store": place}, False, False)["store"] == meant


def test_repairing_settles_what_the_object_store_has(kv: Run, docs: Path, tmp_path: Path, url: str):
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index, "--remote", url)[0] == 0
    shutil.rmtree(index / "packets")
    with sqlite3.connect(index / "index.sqlite") as connection:
        connection.execute("UPDATE chunks SET text = 'forged' WHERE seq = 2")
    connection.close()
    code, out, _ = kv("check", index, "--json")
    assert code == 3 and len(json.loads(out)["damaged_rows_of_index"]) == 1 and len(objects(tmp_path)) == 4
    assert kv("check", index, "--repair")[0] == 0
    assert len(objects(tmp_path)) == len(objects(tmp_path, "owned")) == 3
    code, out, _ = kv("check", index, "--json")
    assert (code, json.loads(out)["chunks_without_packet"]) == (0, 0)


def assert_deleted_apart(folder: Path) -> None:
    """A document that two indexes hold leaves the bucket with the second one that deletes it."""
    with KVPacketRAG.open(folder / "first") as rag:
        rag.delete("d0")
    assert len(objects(folder)) == 4
    with KVPacketRAG.open(folder / "second") as rag:
        assert rag.ask(QUESTION, settings=SHORT).answer.usage.chunks_reused == 4
        rag.delete("d0")
    assert len(objects(folder)) == 3 and len(objects(folder, "owned")) == 2 * 3


def test_what_one_index_deletes_another_one_at_the_same_url_keeps(tiny: None, tmp_path: Path, url: str):
    for name in ("first", "second"):
        with KVPacketRAG.open(tmp_path / name, remote=url) as rag:
            rag.add(documents())
    assert len(objects(tmp_path)) == 4
    assert_deleted_apart(tmp_path)


def test_indexes_that_were_moved_to_one_url_keep_what_the_other_deletes(tiny: None, tmp_path: Path, url: str):
    for name in ("first", "second"):
        with KVPacketRAG.open(tmp_path / name) as rag:
            rag.add(documents())
    for name in ("first", "second"):
        KVPacketRAG.open(tmp_path / name, remote=url).close()
    assert_deleted_apart(tmp_path)


def test_checking_puts_nothing_into_the_object_store_that_a_folder_names(kv: Run, docs: Path, tmp_path: Path, url: str):
    """A folder that came from elsewhere may name any."""
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index)[0] == 0
    with closing(PacketIndex.open(index)) as opened:
        opened.set_setting("remote", url)
    code, out, _ = kv("check", index, "--json")
    found = json.loads(out)
    assert (code, found["packets_whole"], found["chunks_without_packet"]) == (0, 4, 0)
    shutil.rmtree(index / "packets")
    (index / "packets.sqlite").unlink()
    assert kv("check", index)[0] == 1
    assert not (tmp_path / "objects").exists()


def test_packets_go_nowhere_because_a_folder_says_so(kv: Run, docs: Path, tmp_path: Path, url: str):
    """Only a URL that is named by hand is one to upload to, or one that the packets were put to before."""
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index)[0] == 0
    with closing(PacketIndex.open(index)) as opened:
        opened.set_setting("remote", url)
    commands = ("ask", QUESTION), ("ingest", docs), ("delete", "harbour.md"), ("check", "--repair")
    for command, *rest in commands:
        place = [index] if command == "check" else ["--index", index]
        code, _, err = kv(command, *rest, *place)
        assert code == 1 and "never put there" in err and "--remote" in err, command
    with pytest.raises(StoreError, match="remote=URL"):
        KVPacketRAG.open(index)
    assert not (tmp_path / "objects").exists()
    assert kv("ingest", docs, "--index", index, "--remote", url)[0] == 0 and len(objects(tmp_path)) == 4
    assert kv("ask", QUESTION, "--index", index)[0] == 0
