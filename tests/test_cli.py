"""Each command as a person types it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Run, docs_fixture, index_fixture, kv_fixture, tiny_fixture  # noqa: F401
from pipeline_samples import NEW_LEASE, packet_files

import kvpacket_rag
from kvpacket_rag.chunk import Chunk
from kvpacket_rag.cli import main
from kvpacket_rag.cli.output import duration, size, source, table
from kvpacket_rag.errors import StoreFullError
from kvpacket_rag.journal import change_lock
from kvpacket_rag.store import DiskStore

ROOT = Path(kvpacket_rag.__file__).parents[1]


def test_help_names_every_command_and_loads_no_library(kv: Run):
    code, out, _ = kv("--help")
    assert code == 0 and all(name in out for name in ("demo", "ingest", "ask", "delete", "inspect", "import-adapter"))
    script = (
        "import sys; from kvpacket_rag.cli import main\n"
        "try: main(['ask', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(','.join({'torch', 'numpy', 'transformers', 'faiss', 'safetensors', 'tqdm'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.stderr.decode().strip() == "" and b"--compare" in done.stdout


def test_version(kv: Run):
    assert kv("--version")[:2] == (0, f"kvpacket-rag {kvpacket_rag.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["ask", "Who?"], ["ask", "Who?", "--index", "i", "-k", "0"], ["ingest", "--index", "i"], ["inspect"]],
)
def test_wrong_usage_exits_with_two_and_says_how_it_is_used(kv: Run, arguments: list[str]):
    code, out, err = kv(*arguments)
    assert code == 2 and out == "" and "usage: kvpacket" in err


def test_ingest_reports_what_it_did_and_again_that_there_was_nothing_to_do(kv: Run, docs: Path, tmp_path: Path):
    code, out, _ = kv("ingest", docs, "--index", tmp_path / "index")
    assert (
        code == 0 and "4 added, 0 updated, 0 unchanged, 0 skipped" in out and "4 packets, " in out and "tokens/s" in out
    )
    code, out, _ = kv("ingest", docs / "0.txt", docs, "--index", tmp_path / "index")
    assert code == 0 and "0 added, 0 updated, 4 unchanged, 1 skipped" in out and "0 packets encoded" in out


def test_ingest_names_each_file_it_skips_and_goes_on(kv: Run, docs: Path, tmp_path: Path):
    (docs / "empty.md").touch()
    (docs / "picture.png").write_bytes(b"\x89PNG")
    (docs / "broken.txt").write_bytes(b"\xff\xfe\x00\xd8")
    (docs / "broken.pdf").write_bytes(b"%PDF-1.7 and no more")
    code, out, err = kv("ingest", docs, "--index", docs / "index")
    assert code == 0 and "4 added, 0 updated, 0 unchanged, 4 skipped" in out
    for name, reason in {"empty.md": "is empty", "picture.png": "suffix", "broken.txt": "", "broken.pdf": ""}.items():
        assert f"skipped {docs / name}: " in err and reason in err


@pytest.mark.parametrize("what", ["empty folder", "only unreadable", "missing"])
def test_ingest_of_nothing_is_an_error_that_makes_no_index(kv: Run, tmp_path: Path, what: str):
    folder = tmp_path / "docs"
    if what != "missing":
        folder.mkdir()
    if what == "only unreadable":
        (folder / "a.txt").touch()
    code, out, err = kv("ingest", folder, "--index", tmp_path / "index")
    assert code == 1 and out == "" and "kvpacket: error: " in err and str(folder) in err
    assert not (tmp_path / "index").exists()


def test_a_file_that_became_unreadable_keeps_its_last_text_and_that_is_said(kv: Run, docs: Path, index: Path):
    (docs / "0.txt").write_text("")
    _, out, err = kv("ingest", docs, "--index", index)
    assert "3 unchanged, 1 skipped" in out and f"kept {docs / '0.txt'} as it was read before" in err


def test_files_that_are_gone_stay_until_it_is_asked_to_delete_them(kv: Run, docs: Path, index: Path):
    (docs / "0.txt").unlink()
    _, _, err = kv("ingest", docs, "--index", index)
    assert f"kept {docs / '0.txt'}, whose file is gone" in err and "--delete-missing" in err
    _, out, _ = kv("ingest", docs, "--index", index, "--delete-missing")
    assert f"deleted {docs / '0.txt'}" in out and len(packet_files(index)) == 3


def test_an_interrupted_ingest_says_what_is_kept_and_goes_on_later(
    kv: Run, docs: Path, tmp_path: Path, monkeypatch: Any
):
    put, calls = DiskStore.put, []

    def interrupting(self: Any, *arguments: Any) -> None:
        put(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(DiskStore, "put", interrupting)
    code, out, err = kv("ingest", docs, "--index", tmp_path / "index")
    assert code == 130 and out == "" and "Traceback" not in err
    assert "kept: 0 documents in the index and " in err and "run the same command again" in err
    monkeypatch.undo()


def test_a_full_disk_is_one_line_and_what_was_stored_is_kept(kv: Run, docs: Path, tmp_path: Path, monkeypatch: Any):
    put, calls = DiskStore.put, []

    def filling(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise StoreFullError("the disk is full; free some room")
        put(self, *arguments)

    monkeypatch.setattr(DiskStore, "put", filling)
    code, _, err = kv("ingest", docs, "--index", tmp_path / "index")
    assert code == 1 and "kept: 0 documents in the index and 2 packets" in err
    assert err.splitlines()[-1] == "kvpacket: error: the disk is full; free some room"


def test_ask_prints_answer_sources_usage_and_times(kv: Run, index: Path, docs: Path):
    code, out, _ = kv(
        "ask", "Who signed the lease of the harbour office?", "--index", index, "-k", 2, "--max-new-tokens", 8
    )
    assert code == 0 and f"1  ({docs / '1.txt'})" in out
    assert "reused (2 chunks)" in out and "prefilled" in out and "first token after" in out


def test_ask_tells_of_every_chunk_that_was_read_as_text_why(kv: Run, index: Path, docs: Path):
    (docs / "short.txt").write_text("Yes.")
    kv("ingest", docs, "--index", index)
    lost = next((index / "packets").rglob("*.safetensors"))
    lost.write_bytes(lost.read_bytes()[:-1])
    _, out, _ = kv("ask", "Who signed the lease?", "--index", index, "-k", 9, "--max-new-tokens", 2)
    told = [line for line in out.splitlines() if line.startswith("Read as text  ")]
    assert len(told) == 2 and "reused (3 chunks)" in out
    assert any("short: it has fewer than 16 tokens" in line for line in told)


def test_a_source_is_named_once_where_it_has_no_title():
    assert source(Chunk("c", "text", "/docs/a.txt", {})) == "/docs/a.txt"
    assert source(Chunk("c", "text", "/docs/a.pdf", {"page": 2})) == "/docs/a.pdf, page 2"
    assert source(Chunk("c", "text", "/docs/a.txt", {"title": "Leases"})) == "Leases  (/docs/a.txt)"


def test_streamed_output_is_the_same_answer(kv: Run, index: Path):
    asked = ["ask", "Who signed the lease?", "--index", index, "--max-new-tokens", 8]
    whole, streamed = kv(*asked)[1], kv(*asked, "--stream")[1]
    assert streamed.split("\n\nSource")[0].strip() == whole.split("\n\nSource")[0].strip() != ""


def test_compared_answers_and_their_times_are_one_json_object(kv: Run, index: Path):
    code, out, _ = kv("ask", "Who signed?", "--index", index, "-k", 9, "--max-new-tokens", 4, "--compare", "--json")
    found = json.loads(out)
    assert code == 0 and found["usage"]["chunks_reused"] == len(found["sources"]) == 4
    assert found["prefill"]["usage"]["packet_tokens"] == 0 and found["usage"]["packet_tokens"] > 0
    times = found["prefill"]["timings"]["ttft_seconds"], found["timings"]["ttft_seconds"]
    assert found["ttft_ratio"] == pytest.approx(times[0] / times[1])


def test_compared_answers_are_printed_side_by_side(kv: Run, index: Path):
    _, out, _ = kv("ask", "Who signed the lease?", "--index", index, "--max-new-tokens", 4, "--compare")
    assert "Full prefill" in out and "times sooner from packets" in out


def test_decoding_options_reach_the_model(kv: Run, index: Path):
    def answer(*options: object) -> Any:
        return json.loads(kv("ask", "Who?", "--index", index, "--json", "--max-new-tokens", 12, *options)[1])

    plain = answer()
    assert plain["usage"]["completion_tokens"] <= 12
    hot = [answer("--temperature", 5, "--seed", seed)["answer"] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    stop = plain["answer"][2:4]
    assert stop not in answer("--stop", stop)["answer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "", "--index", "INDEX"], "the question is empty"),
        (["ask", "Who? " * 3000, "--index", "INDEX"], "window|more than the 2048"),
        (["ask", "Who?", "--index", "INDEX", "--temperature", "-1"], "temperature is -1.0"),
        (["ask", "Who?", "--index", "nowhere"], "nowhere holds no index; make one with 'kvpacket ingest"),
        (["ask", "Who?", "--index", "INDEX", "--model", "other"], "weights differ.*kvpacket ingest .* --model other"),
        (["delete", "none.txt", "--index", "INDEX"], "no document 'none.txt'"),
        (["inspect", "nowhere"], "nowhere holds no index"),
        (["inspect", __file__], "no safetensors file"),
        (["import-adapter", "none.pt", "out.safetensors"], "none.pt is no torch file"),
        (["ingest", "none.txt", "--index", "INDEX"], "'none.txt' does not exist"),
        (["ingest", __file__, "--index", __file__], "none of|it is a file|no document"),
    ],
)
def test_every_error_is_one_line_on_standard_error(kv: Run, index: Path, arguments: list[str], message: str):
    code, out, err = kv(*[str(index) if argument == "INDEX" else argument for argument in arguments])
    last = err.splitlines()[-1]
    assert code == 1 and out == "" and last.startswith("kvpacket: error: ") and "Traceback" not in err
    assert re.search(message, last)


def test_debug_shows_where_an_error_comes_from(kv: Run, index: Path):
    code, _, err = kv("ask", "", "--index", index, "--debug")
    assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("kvpacket: error: ")


def test_an_index_path_that_is_a_file_is_an_error(kv: Run, docs: Path):
    code, _, err = kv("ingest", docs, "--index", docs / "0.txt")
    assert code == 1 and "it is a file" in err


def test_reencode_makes_an_index_readable_by_another_model(kv: Run, index: Path):
    old = packet_files(index)
    assert kv("ingest", "--reencode", "--model", "other", "--index", index)[0] == 0
    assert len(packet_files(index)) == 4 and not old & packet_files(index)
    assert (
        json.loads(kv("ask", "Who?", "--index", index, "--json", "--max-new-tokens", 2)[1])["usage"]["chunks_reused"]
        == 4
    )


def test_delete_takes_an_id_a_path_or_the_end_of_one(kv: Run, index: Path, docs: Path, monkeypatch: Any):
    monkeypatch.chdir(docs)
    code, out, _ = kv("delete", docs / "0.txt", "1.txt", "docs/2.txt", "--index", index)
    assert code == 0 and out.count("deleted ") == 3 and len(packet_files(index)) == 1
    assert kv("delete", "3.txt", "0.txt", "--index", index)[0] == 1 and len(packet_files(index)) == 1


def test_a_deletion_waits_while_another_process_changes_the_index(kv: Run, index: Path, docs: Path):
    with ThreadPoolExecutor(1) as thread:
        with change_lock(index):
            deletion = thread.submit(main, ["delete", str(docs / "0.txt"), "--index", str(index)])
            assert not wait([deletion], timeout=1).done and len(packet_files(index)) == 4
        assert deletion.result(60) == 0 and len(packet_files(index)) == 3


def test_delete_asks_which_one_is_meant(kv: Run, docs: Path, tmp_path: Path):
    (docs / "more").mkdir()
    (docs / "more" / "0.txt").write_text(NEW_LEASE)
    kv("ingest", docs, "--index", tmp_path / "index")
    code, _, err = kv("delete", "0.txt", "--index", tmp_path / "index")
    assert code == 1 and "may be any of" in err and str(docs / "more" / "0.txt") in err


def test_a_closed_pipe_ends_quietly(index: Path):
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from kvpacket_rag.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "inspect", str(index)]
    done = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_numbers_are_written_for_people():
    assert [size(n) for n in (0, 999, 1000, 12_345, 508_500_000, 1.2e12)] == [
        "0 bytes", "999 bytes", "1.0 kB", "12.3 kB", "508.5 MB", "1.2 TB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 59, 61, 3599.9, 7500)] == ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "2 h 5 min"]
    assert table(["n", "ms"], [["1", "1,200"], ["median", "3"]]).splitlines()[-1] == "median      3"
