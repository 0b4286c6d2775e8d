"""An index whose packets lie in an object store: several machines, namespaces, and the command line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from cli_samples import Run, docs_fixture, kv_fixture, tiny_fixture  # noqa: F401 (fixtures)
from conftest import CHUNKS
from pipeline_samples import documents, encoded_texts, packet_files

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import ModelNotFoundError, StoreError
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.store import DiskStore, RemoteStore

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
        assert code == 1 and "never uploaded there" in err and "--remote" in err, command
    with pytest.raises(StoreError, match=r"remote=URL.* or with --remote none"):
        KVPacketRAG.open(index)
    assert not (tmp_path / "objects").exists()
    assert kv("ingest", docs, "--index", index, "--remote", url)[0] == 0 and len(objects(tmp_path)) == 4
    assert kv("ask", QUESTION, "--index", index)[0] == 0


@pytest.mark.parametrize("namespace", ["", "ann"])
def test_packets_are_kept_where_they_are_by_remote_none(tiny: None, tmp_path: Path, url: str, namespace: str):
    folder = tmp_path / "index"
    with KVPacketRAG.open(folder, namespace=namespace) as rag:
        rag.add(documents())
        rag.index.set_setting("remote", url)
    with KVPacketRAG.open(folder, remote="none", namespace=namespace) as rag:
        assert rag.ask(QUESTION, settings=SHORT).answer.usage.chunks_reused == 4
    with KVPacketRAG.open(folder, namespace=namespace) as rag:
        assert isinstance(rag.engine.store, DiskStore) and not rag.index.get_setting("remote")
    assert not (tmp_path / "objects").exists()


def test_commands_that_take_no_url_go_on_once_it_is_forgotten(kv: Run, docs: Path, tmp_path: Path, url: str):
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index, "--remote", "none")[0] == 0
    with closing(PacketIndex.open(index)) as opened:
        opened.set_setting("remote", url)
    assert kv("check", index, "--repair")[0] == kv("delete", docs / "0.txt", "--index", index)[0] == 1
    assert kv("ask", QUESTION, "--index", index, "--remote", "none", "--max-new-tokens", 2)[0] == 0
    assert kv("check", index, "--repair")[0] == kv("delete", docs / "0.txt", "--index", index)[0] == 0


def test_packets_in_an_object_store_are_not_said_to_be_in_the_folder(tiny: None, tmp_path: Path, url: str):
    with KVPacketRAG.open(tmp_path / "index", remote=url) as rag:
        rag.add(documents())
    rows = tmp_path / "rows"
    rows.mkdir()
    shutil.copy(tmp_path / "index" / "index.sqlite", rows)
    for folder in (tmp_path / "index", copied(tmp_path / "index", tmp_path / "copy"), rows):
        with pytest.raises(StoreError, match=f"lie in the object store at {url}.*without --remote none"):
            KVPacketRAG.open(folder, remote="none")
        with KVPacketRAG.open(folder) as rag:
            assert rag.engine.store.url == url and rag.ask(QUESTION, settings=SHORT).answer.usage.chunks_reused == 4


def test_an_index_follows_its_packets_though_the_model_did_not_load(
    tiny: None, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    with KVPacketRAG.open(tmp_path / "index") as rag:
        rag.add(documents(CHUNKS[:2]))
    with monkeypatch.context() as patch, pytest.raises(ModelNotFoundError):
        patch.setattr(KVPacketEngine, "load", failing := MagicMock(side_effect=ModelNotFoundError("no such model")))
        KVPacketRAG.open(tmp_path / "index", remote=url)
    assert failing.called and len(objects(tmp_path)) == 2
    with KVPacketRAG.open(tmp_path / "index") as rag:
        rag.add(documents())
    with KVPacketRAG.open(tmp_path / "index", remote=url) as rag:
        assert rag.ask(QUESTION, settings=SHORT).answer.usage.chunks_reused == 4 == len(objects(tmp_path))


def test_a_folder_of_an_object_store_is_no_store_by_itself(kv: Run, docs: Path, tmp_path: Path, url: str):
    """As after a process was killed between the upload and the note in the index."""
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index, "--remote", url)[0] == 0
    with closing(PacketIndex.open(index)) as opened:
        opened.set_setting("remote", "")
    for remote in (None, "none"):
        with pytest.raises(
            StoreError, match=rf"lie in the object store at {url}.*open it with that URL \(--remote URL"
        ):
            KVPacketRAG.open(index, remote=remote)
    for command in (["delete", docs / "0.txt", "--index", index], ["check", index, "--repair"]):
        code, _, err = kv(*command)
        assert code == 1 and url in err and "--remote URL" in err
    assert kv("ask", QUESTION, "--index", index, "--remote", url, "--max-new-tokens", 2)[0] == 0
    assert kv("delete", docs / "0.txt", "--index", index)[0] == 0 and len(objects(tmp_path)) == 3


def test_a_cache_without_an_index_is_checked_as_one(kv: Run, docs: Path, tmp_path: Path, url: str):
    index = tmp_path / "index"
    assert kv("ingest", docs, "--index", index, "--remote", url)[0] == 0
    (index / "index.sqlite").unlink()
    assert kv("check", index)[0] == kv("check", index, "--repair")[0] == 0
    with closing(RemoteStore(url, index)) as store:
        assert len(store) == len(objects(tmp_path)) == 4
