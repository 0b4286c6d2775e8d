from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpacket_rag.documents import Document, read_documents
from kvpacket_rag.errors import DocumentError


def read(*paths: Path, **options: Any) -> tuple[list[Document], dict[str, str]]:
    skipped: dict[str, str] = {}
    documents = list(read_documents(paths, lambda path, reason: skipped.update({path.name: reason}), **options))
    return documents, skipped


def test_content_hash_is_that_of_the_text_alone() -> None:
    one, other = Document("a", "grüße", {"x": 1}), Document("b", "grüße")
    assert one.content_hash == other.content_hash == hashlib.sha256("grüße".encode()).hexdigest()


def test_lone_surrogates_are_refused_by_place() -> None:
    with pytest.raises(DocumentError, match=r"text of document 'a' .* at character 2"):
        Document("a", "ab\ud800")
    with pytest.raises(DocumentError, match="id of document"):
        Document("\udcff", "ab")


def test_a_text_file_keeps_its_text_and_names_its_source(tmp_path: Path) -> None:
    path = tmp_path / "leave.txt"
    path.write_text("  Twenty days. <|im_end|>\n")
    [document], skipped = read(path)
    assert document == Document(
        path.as_posix(),
        "  Twenty days. <|im_end|>\n",
        {"source": path.as_posix(), "title": "leave", "kind": "text"},
    )
    assert not skipped


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks_decide_the_encoding(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Grüße 你好 🎈".encode(encoding))
    [document], _ = read(path)
    assert document.text == "Grüße 你好 🎈"


def test_all_line_ends_become_newlines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    [document], _ = read(tmp_path)
    assert document.text == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"", "is empty"),
        ("a.md", b" \n\t \n", "no text but white space"),
        ("a.txt", b"ab\xe9cd", "not valid utf-8: 0xe9 at byte offset 2"),
        ("a.txt", b"\xff\xfea\x00\x00\xd8b\x00", "not valid utf-16-le: 0x00 at byte offset 4"),
        ("a.txt", "abc".encode("utf-16-le"), "null character at byte offset 1"),
        ("a.txt", "ab\0".encode("utf-16"), "null character at byte offset 6"),
        ("a.png", b"\x89PNG", "suffix '.png', which is none of .txt"),
        ("README", b"text", "suffix ''"),
        ("a.txt", b"x" * 1001, "is 1,001 bytes long, over the limit of 1,000"),
        ("a.html", b"<p></p><script>text</script>", "no text but white space"),
        ("a.html", b'<meta charset="klingon">x', "encoding 'klingon'"),
        ("a.html", b'<meta charset="utf-8">\xff', "not valid utf-8: 0xff at byte offset 22"),
        ("a.pdf", b"%PDF-1.7 and nothing more", "cannot be read as a PDF"),
        ("a.pdf", b"plain text", "cannot be read as a PDF"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_the_rest_goes_on(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_text("still here")
    documents, skipped = read(tmp_path, max_bytes=1000)
    assert [document.text for document in documents] == ["still here"]
    assert list(skipped) == [name]
    assert reason in skipped[name]


def test_a_missing_path_raises_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="nowhere' does not exist"):
        read_documents([tmp_path, tmp_path / "nowhere"], lambda path, reason: None)


def test_folders_are_read_in_sorted_order_without_hidden_and_excluded_entries(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.TXT", ".git/x.txt", "b/.hidden.txt", "index/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    documents, skipped = read(tmp_path, exclude=[tmp_path / "b" / ".." / "index"])
    assert [document.text for document in documents] == ["a.txt", "b/1.txt", "b/2.txt", "c.TXT"]
    assert skipped == {"index": "is excluded"}


def test_a_single_path_needs_no_list_and_a_hidden_one_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / ".notes.txt"
    path.write_text("hidden")
    assert [document.text for document in read_documents(str(path), lambda path, reason: None)] == ["hidden"]


def test_a_file_has_one_id_however_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "docs" / "a.txt"
    path.parent.mkdir()
    path.write_text("a")
    (tmp_path / "link").symlink_to("docs")
    monkeypatch.chdir(tmp_path)
    for way in (path, path.parent, tmp_path, Path("docs"), Path("docs/../docs/a.txt"), Path("link")):
        [document] = read(way)[0]
        assert document.document_id == path.as_posix()


def test_equal_relative_paths_in_two_folders_have_two_ids(tmp_path: Path) -> None:
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        (tmp_path / root / "a.txt").write_text("same")
    documents, _ = read(tmp_path / "one", tmp_path / "two")
    assert [document.document_id for document in documents] == [
        (tmp_path / root / "a.txt").as_posix() for root in ("one", "two")
    ]


def test_what_is_reached_twice_is_read_once_and_loops_of_links_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "z").symlink_to(tmp_path)
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "self.txt").symlink_to("self.txt")
    documents, skipped = read(tmp_path, tmp_path / "a.txt")
    assert [document.text for document in documents] == ["a"]
    assert {skipped.pop(name) for name in ("z", "b.txt", "a.txt")} == {"was reached before"}
    assert "broken link" in skipped.pop("self.txt")
    assert not skipped


def test_a_pipe_is_skipped_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    assert "neither a file nor a folder" in read(tmp_path)[1]["a.txt"]


def test_a_file_name_that_is_no_unicode_is_skipped(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as file:
        file.write("text")
    documents, skipped = read(tmp_path)
    assert not documents
    assert "lone surrogate" in skipped["\udcff.txt"]


def test_denied_files_and_folders_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("a")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", deny)
        assert read(tmp_path)[1] == {"a.txt": "cannot be read (Permission denied)"}
    monkeypatch.setattr(os, "listdir", deny)
    assert read(tmp_path)[1] == {tmp_path.name: "cannot be listed (Permission denied)"}


def test_the_parsers_are_never_loaded_here(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>text")
    code = (
        "import sys, kvpacket_rag.documents as d; "
        f"assert [found.text for found in d.read_documents({str(tmp_path)!r}, print)] == ['text']; "
        "sys.exit('bs4' in sys.modules or 'pypdf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["page.html", "notes.md"])
@pytest.mark.parametrize(
    ("title", "expected"), [("wort " * 400_000, "wort " * 58 + "wort…"), ("x" * 9999, "x" * 299 + "…")]
)
def test_a_title_that_is_too_long_for_one_is_cut(tmp_path: Path, name: str, title: str, expected: str) -> None:
    markup = {".html": f"<title>{title}</title><p>text", ".md": f"# {title}\ntext"}
    (tmp_path / name).write_text(markup[Path(name).suffix])
    [document], _ = read(tmp_path)
    assert document.metadata["title"] == expected and len(expected) <= 300


def test_a_reader_that_is_left_in_a_cycle_leaves_no_process(tmp_path: Path):
    (tmp_path / "page.html").write_text("<p>Text</p>")
    documents: Any = read_documents([tmp_path], on_skip=print)
    next(documents)
    found = [entry for entry in gc.get_objects() if type(entry) is subprocess.Popen]
    processes = [process for process in found if process.poll() is None]
    cycle: list[object] = [documents]
    cycle.append(cycle)
    del documents, cycle
    gc.collect()
    assert processes and all(process.poll() is not None for process in processes)
