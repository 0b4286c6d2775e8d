"""Documents made to harm are left out with the reason, in bounded memory and time, and the rest is read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from hostile_samples import FONT, HELVETICA, HTML_BOMBS, PDF_BOMBS, SHOW, paged, raw_pdf, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpacket_rag.documents import read_documents
from kvpacket_rag.errors import DocumentError
from kvpacket_rag.parser_process import ParserProcess
from kvpacket_rag.parsers import read_html, read_pdf
from kvpacket_rag.readers import Content, read_markdown, read_text

PAGE = paged([stream(SHOW)], 1, FONT, HELVETICA)
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ALL_BOMBS = """
import resource, sys, time
from hostile_samples import HTML_BOMBS, PDF_BOMBS
from kvpacket_rag.errors import DocumentError
from kvpacket_rag.parser_process import ParserProcess

with ParserProcess(max_bytes=1 << 30, seconds=1) as parsers:
    for suffix, bombs in ((".pdf", PDF_BOMBS), (".html", HTML_BOMBS)):
        for name, make in bombs.items():
            data, started = make(), time.perf_counter()
            try:
                told = f"{len(parsers.parse(suffix, data).text)} characters"
            except DocumentError as error:
                told = str(error)
            del data
            seconds = time.perf_counter() - started
            print(f"{seconds:6.2f} s  {suffix} {name}: {told[:150]}", file=sys.stderr)
            print(seconds)
            assert "exit status 1" not in told and "at its start" not in told, told
    assert parsers.parse(".html", b"<p>still here").text == "still here"
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="bounds of other systems are their own")
def test_no_bomb_takes_more_than_its_bounds_and_the_next_file_is_read() -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    command = [sys.executable, "-c", ALL_BOMBS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    *seconds, kilobytes = map(float, done.stdout.split())
    assert len(seconds) == len(PDF_BOMBS) + len(HTML_BOMBS) and max(seconds) < 20
    assert kilobytes < 1 << 20


def test_a_parser_that_takes_too_long_or_crashes_is_ended_and_the_next_file_is_read(tmp_path: Path) -> None:
    with ParserProcess(seconds=1) as parsers:
        with pytest.raises(DocumentError, match="takes longer than 1 seconds"):
            parsers.parse(".pdf", PDF_BOMBS["one stream on ten thousand pages"]())
        assert parsers.parse(".pdf", PAGE).text.strip() == "a"
        process = parsers._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(DocumentError, match="exit status -9"):
            parsers.parse(".pdf", PAGE)
        assert parsers.parse(".pdf", PAGE).text.strip() == "a"
    assert parsers._process is None


def test_threads_that_share_a_parser_get_their_own_answers() -> None:
    texts = [f"text {number} " * 2000 for number in range(40)]
    with ParserProcess() as parsers, ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda text: parsers.parse(".html", f"<p>{text}".encode()).text, texts)
        assert [text.strip() for text in found] == [text.strip() for text in texts]


def test_a_parser_without_memory_says_so_and_the_next_file_is_read() -> None:
    with ParserProcess(max_bytes=300 << 20) as parsers:
        with pytest.raises(DocumentError, match="needs more than 300 MB of memory"):
            parsers.parse(".html", HTML_BOMBS["white space"]())
        assert parsers.parse(".pdf", PAGE).text.strip() == "a"


def test_a_python_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>text")
    (tmp_path / "b.txt").write_text("text")
    skipped: list[str] = []
    for python in ("", "/bin/false"):
        monkeypatch.setattr(sys, "executable", python)
        found = list(read_documents(tmp_path, lambda path, reason: skipped.append(reason)))
        assert [document.text for document in found] == ["text"]
    assert len(skipped) == 2 and all("needs a process of its own" in reason for reason in skipped)


def test_modules_in_the_working_folder_are_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("pypdf", "bs4", "json", "signal", "kvpacket_rag"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with ParserProcess() as parsers:
        assert parsers.parse(".pdf", PAGE).text.strip() == "a"
    assert not (tmp_path / "ran").exists()


def zipped(size: int) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../word/document.xml", b"\0" * size)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["a.zip", "a.docx", "a.epub", "a.pdf", "a.html", "a.txt", "a.md", "a.gz"])
def test_archives_are_never_unpacked_whatever_their_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(zipped(100_000_000))
    skipped: list[str] = []
    assert list(read_documents(tmp_path, lambda path, reason: skipped.append(reason))) == []
    assert len(skipped) == 1 and list(tmp_path.iterdir()) == [tmp_path / name]


def is_text_or_refused(read: object, data: bytes) -> None:
    with contextlib.suppress(DocumentError):
        content = read(data)  # type: ignore[operator]
        assert isinstance(content, Content) and "\0" not in content.text


marks = st.sampled_from(
    "<|>|</|<!|<!--|-->|<?|<![CDATA[|]]>|&|&#|&#x110000;|&#xd800;|&lt|=|\"|'|/>|p|pre|td|br|title|script|svg|x|é| |\n"
    "|\r|\f|\u2028|meta charset=|utf-16".split("|")
)


@fuzz
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (read_text, read_markdown, read_html, read_pdf):
        is_text_or_refused(read, data)


@fuzz
@given(st.lists(marks, max_size=60).map("".join))
def test_any_markup_is_read_or_refused(markup: str) -> None:
    for read in (read_text, read_markdown, read_html):
        is_text_or_refused(read, markup.encode())


pieces = st.sampled_from(b"0|999999999|-1| R|<<|>>|[|]|(|)|/Kids|/Length|obj|endobj|stream|xref|trailer|| ".split(b"|"))


@fuzz
@given(st.lists(st.tuples(st.integers(0, len(PAGE)), st.integers(0, 4), st.binary(max_size=3) | pieces), max_size=12))
def test_any_damage_to_a_pdf_is_read_or_refused(damage: list[tuple[int, int, bytes]]) -> None:
    content = bytearray(PAGE)
    for start, length, piece in damage:
        content[start : start + length] = piece
    is_text_or_refused(read_pdf, bytes(content))


atoms = st.sampled_from(b"1 -1 0.5 99999999999 (a) <0041> /F /X true null 3\t0\tR [ ] << >>".split(b" "))
operators = st.sampled_from(b"BT ET Tf Tj TJ ' \" Td TD Tm T* Tc Tw Tz TL Ts q Q cm Do BI ID EI gs BDC EMC".split())


@fuzz
@given(st.lists(atoms | operators, max_size=40).map(b" ".join), st.lists(atoms, max_size=12).map(b" ".join))
def test_any_page_of_a_pdf_is_read_or_refused(shown: bytes, entries: bytes) -> None:
    is_text_or_refused(read_pdf, paged([stream(b"BT /F 9 Tf " + shown)], 1, FONT, HELVETICA))
    is_text_or_refused(read_pdf, paged([stream(SHOW)], 1, FONT, b"<</Type /Font " + entries + b">>"))
    is_text_or_refused(read_pdf, raw_pdf(b"<</Type /Catalog /Pages 2 0 R " + entries + b">>", entries))
