"""HTML and PDF to text.

The libraries behind it may be led astray by hostile files: to hold any size in memory, to take any time, or to crash.
What is known of that is refused here, and the rest is bounded by :mod:`~kvpacket_rag.parser_process`, where this runs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO

from bs4 import BeautifulSoup, Tag
from bs4.builder import ParserRejectedMarkup
from bs4.dammit import EncodingDetector
from bs4.element import CData, NavigableString, PageElement
from pypdf import PdfReader
from pypdf.errors import DependencyError

from kvpacket_rag.errors import DocumentError
from kvpacket_rag.readers import Content, decode

PAGE_BREAK = "\n\n\f"  # a paragraph break to a splitter, and the form feeds before a place count its page

# Small hostile files can unfold to any size or time; honest ones stay far below these limits.
_MAX_MARKUP = 500_000  # tags and attributes of one HTML file; the parser needs up to 1 kB for each
_MAX_UNCLOSED = 10_000  # "<" without ">" in one HTML file; parsing time grows with their square
_MAX_PDF_CHARACTERS = 100_000_000  # in all pages together, which may share one compressed stream
_DROPPED = frozenset({"title", "script", "style", "template", "noscript", "svg"})  # not "head": it may be left open
_PARAGRAPHS = frozenset(
    (
        "address article aside blockquote dl fieldset figure footer form h1 h2 h3 h4 h5 h6 header hr main nav ol p "
        "pre section table ul"
    ).split()
)
_LINES = frozenset("body caption dd details div dt figcaption legend li option summary tbody tfoot thead tr".split())


def read_html(data: bytes) -> Content:
    """The visible text of a page, blocks on lines of their own; the encoding is the declared one or UTF-8."""
    declared = (EncodingDetector.find_declared_encoding(data, is_html=True) or "utf-8").lower()
    if declared.startswith(("utf-16", "utf-32")):  # it could not have been read if it were true
        declared = "utf-8"
    if declared in ("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"):  # what browsers take them for
        declared = "windows-1252"
    markup = decode(data, declared)
    if (count := markup.count("<") + markup.count("=")) > _MAX_MARKUP:
        raise DocumentError(f"holds {count:,} tags and attributes, over the limit of {_MAX_MARKUP:,}; split it")
    if (count := markup.count("<") - markup.count(">")) > _MAX_UNCLOSED:
        raise DocumentError(f"holds {count:,} tags that are never closed, so it is damaged or no HTML")
    try:
        with warnings.catch_warnings():  # about XHTML and very short files; both are read well
            warnings.simplefilter("ignore")
            soup = BeautifulSoup(markup, "html.parser")
    except ParserRejectedMarkup as error:
        raise DocumentError(f"cannot be read as HTML ({error})") from error
    title = " ".join(soup.title.get_text().split()) if soup.title else None
    return Content("html", _html_text(soup), title)


def _html_text(soup: BeautifulSoup) -> str:
    """The visible text. Walks with a stack of its own, so that deep nesting is no recursion."""
    lines = _Lines()
    preformatted = 0
    stack: list[tuple[PageElement, bool]] = [(soup, True)]
    while stack:
        element, entering = stack.pop()
        if not isinstance(element, Tag):
            if type(element) in (NavigableString, CData):  # not its subclasses: comments, declarations, …
                lines.add(str(element), preformatted > 0)
            continue
        if element.name in _DROPPED:
            continue
        lines.edge(element.name, entering)
        preformatted += (element.name == "pre") * (1 if entering else -1)
        if entering:
            stack.append((element, False))
            stack.extend((child, True) for child in reversed(element.contents))
    return lines.text()


class _Lines:
    """Joins strings as a browser lays them out: blocks on lines of their own, cells parted by tabs."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._breaks = 0  # line breaks due before the next text

    def add(self, text: str, preformatted: bool) -> None:
        at_start = self._breaks > 0 or not self._pieces or self._pieces[-1].endswith((" ", "\t", "\n"))
        if preformatted:
            text = text.lstrip("\n") if self._breaks else text
        else:
            text = re.sub(r"\s+", " ", text)
            text = text.lstrip(" ") if at_start else text
        if text and self._breaks and self._pieces:
            self._pieces[-1] = self._pieces[-1].rstrip()
            self._pieces.append("\n" * self._breaks)
        if text:
            self._breaks = 0
            self._pieces.append(text)

    def edge(self, tag: str, entering: bool) -> None:
        if tag == "br":
            self._breaks = min(2, self._breaks + entering)
        elif tag in _PARAGRAPHS:
            self._breaks = 2
        elif tag in _LINES:
            self._breaks = max(1, self._breaks)
        elif tag in ("td", "th") and entering and not self._breaks:
            self._pieces.append("\t")

    def text(self) -> str:
        return "".join(self._pieces)


def read_pdf(data: bytes) -> Content:
    """The text layer of a PDF, page by page; encryption with an empty password is no obstacle."""
    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError("is encrypted; save it without a password")
        text = PAGE_BREAK.join(_pdf_pages(reader))
    except (DocumentError, MemoryError):
        raise
    except DependencyError as error:
        raise DocumentError(f"is encrypted in a way that needs one more package ({error})") from error
    except Exception as error:  # a damaged file makes the parser stumble over nearly any exception there is
        raise DocumentError(f"cannot be read as a PDF ({type(error).__name__}: {error})") from error
    if not text.strip():
        raise DocumentError("is a PDF without a text layer; put it through text recognition (OCR) first")
    title = None
    with suppress(Exception):  # damaged metadata is no reason to lose the text
        title = str(reader.metadata.title or "").strip() if reader.metadata else None
    return Content("pdf", text, title)


def _pdf_pages(reader: PdfReader) -> Iterator[str]:
    size = 0
    for page in reader.pages:
        text = page.extract_text().replace("\0", "").replace("\f", "\n")
        # Fonts may map glyphs to halves of surrogate pairs: whole pairs are joined, lone halves marked as lost.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        size += len(text)
        if size > _MAX_PDF_CHARACTERS:
            raise DocumentError(f"holds more than {_MAX_PDF_CHARACTERS:,} characters; split it")
        yield text


PARSERS: Mapping[str, Callable[[bytes], Content]] = {".html": read_html, ".htm": read_html, ".pdf": read_pdf}
