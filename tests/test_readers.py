from __future__ import annotations

from io import BytesIO

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from kvpacket_rag import parsers, readers
from kvpacket_rag.errors import DocumentError


def pdf_bytes(*pages: str, title: str = "", passwords: tuple[str, str] | None = None) -> bytes:
    writer = PdfWriter()
    names = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in names.items()})
    fonts = DictionaryObject({NameObject("/F1"): font})
    for text in pages:
        page = writer.add_blank_page(300, 300)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(stream.flate_encode())
    writer.add_metadata({"/Title": title})
    if passwords:
        writer.encrypt(*passwords, algorithm="RC4-128")
    buffer = BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def html_text(markup: str) -> str:
    return parsers.read_html(markup.encode()).text


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("intro\n\n# The *title*\n## Not\n# Nor this", "The *title*"),
        ("```sh\n# comment\n```\n# Title #\n", "Title"),
        ("# C#\n", "C#"),
        ("#hashtag\n\nSetext\n====\n", None),
        ("# " + " " * 100_000 + "x", "x"),
    ],
)
def test_markdown_takes_its_title_from_the_first_heading(text: str, title: str | None) -> None:
    assert readers.read_markdown(text.encode()) == readers.Content("markdown", text, title)


def test_html_blocks_become_lines_and_code_is_left_out() -> None:
    markup = """<!doctype html><html><head><title>T</title><style>p {}</style><script>x < 1</script></head>
    <body><!-- no --><h1>Leave  policy</h1><p>Twenty <b>d</b>ays,<br>paid.
    Ask&nbsp;HR &amp; wait.</p><ul><li>one</li><li>two</li></ul><noscript>no</noscript>
    <table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table><div>x</div><div>y</div></body></html>"""
    assert html_text(markup) == ("Leave policy\n\nTwenty days,\npaid. Ask HR & wait.\n\none\ntwo\n\na\tb\n1\t2\n\nx\ny")


def test_html_preformatted_text_keeps_its_white_space() -> None:
    assert html_text("<p>a<pre>\nif x:\n    y\n\n\nz\n</pre>b") == "a\n\nif x:\n    y\n\n\nz\n\nb"


def test_html_title_is_metadata_and_an_open_head_hides_nothing() -> None:
    content = parsers.read_html(b"<head><title>The\n title</title><p>Text")
    assert content == readers.Content("html", "Text", "The title")


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [("windows-1252", "cp1252"), ("iso-8859-1", "cp1252"), ("shift_jis", "shift_jis"), ("utf-16", "utf-8")],
)
def test_html_is_read_in_the_encoding_it_declares(declared: str, encoding: str) -> None:
    text = "日本語" if encoding == "shift_jis" else "grün"
    assert parsers.read_html(f'<meta charset="{declared}"><p>{text}'.encode(encoding)).text == text


def test_deeply_nested_html_is_no_recursion() -> None:
    assert html_text("<div>" * 20_000 + "deep") == "deep"


@pytest.mark.parametrize(
    ("markup", "reason"), [("<b>" * 500_001, "tags and attributes"), ("<!--" * 20_000, "never closed")]
)
def test_html_that_would_unfold_is_refused(markup: str, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        html_text(markup)


def test_pdf_pages_are_parted_by_form_feeds() -> None:
    content = parsers.read_pdf(pdf_bytes("First page.", "", "Third page.", title="The title"))
    assert [page.strip() for page in content.text.split("\f")] == ["First page.", "", "Third page."]
    assert (content.kind, content.title) == ("pdf", "The title")


def test_pdf_with_an_owner_password_alone_is_read() -> None:
    assert parsers.read_pdf(pdf_bytes("Secret.", passwords=("", "owner"))).text == "Secret."


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf_bytes("Secret.", passwords=("user", "owner")), "is encrypted; save it without a password"),
        (pdf_bytes("", ""), "without a text layer"),
        (pdf_bytes("Text.")[:400], "cannot be read as a PDF"),
    ],
    ids=["encrypted", "scan", "truncated"],
)
def test_pdf_without_text_to_take_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        parsers.read_pdf(data)


def test_pdf_that_would_unfold_is_refused() -> None:
    data = pdf_bytes(" " * 76_000_000)
    assert len(data) < 100_000
    with pytest.raises(DocumentError, match="LimitReachedError"):
        parsers.read_pdf(data)


def test_pdf_text_is_limited_over_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pdf_bytes(*["0123456789"] * 3)
    monkeypatch.setattr(parsers, "_MAX_PDF_CHARACTERS", 30)
    assert parsers.read_pdf(data).text.count("0123456789") == 3
    monkeypatch.setattr(parsers, "_MAX_PDF_CHARACTERS", 29)
    with pytest.raises(DocumentError, match="more than 29 characters"):
        parsers.read_pdf(data)
