"""Small files made to unfold to any size or time, or to lead their parsers astray."""

from __future__ import annotations

import zlib
from collections.abc import Callable


def raw_pdf(*objects: bytes) -> bytes:
    """A file of objects 1, 2, …, of which the first is the catalogue."""
    parts, places, size = [b"%PDF-1.7\n"], [], 9
    for number, body in enumerate(objects, 1):
        places.append(size)
        parts.append(b"%d 0 obj\n%b\nendobj\n" % (number, body))
        size += len(parts[-1])
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(objects) + 1
    parts.append(b"xref\n0 %d\n0000000000 65535 f \n%btrailer <</Size %d /Root 1 0 R>>\n" % (count, rows, count))
    parts.append(b"startxref\n%d\n%%%%EOF" % size)
    return b"".join(parts)


def stream(content: bytes, times: int = 1, about: bytes = b"") -> bytes:
    """A stream that was compressed so many times."""
    for _ in range(times):
        content = zlib.compress(content, 1)
    filters = b" ".join([b"/FlateDecode"] * times)
    return b"<<%b /Length %d /Filter [%b]>>stream\n%b\nendstream" % (about, len(content), filters, content)


def paged(streams: list[bytes], pages: int, resources: bytes = b"", *more: bytes) -> bytes:
    """Pages that show the streams in turn; objects 3 to 2 + len(streams), then ``more``, then the pages."""
    first = 3 + len(streams) + len(more)
    kids = b" ".join(b"%d 0 R" % (first + number) for number in range(pages))
    page = b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Resources <<%b>> /Contents %d 0 R>>"
    bodies = [page % (resources, 3 + number % len(streams)) for number in range(pages)]
    tree = b"<</Type /Pages /Count %d /Kids [%b]>>" % (pages, kids)
    return raw_pdf(b"<</Type /Catalog /Pages 2 0 R>>", tree, *streams, *more, *bodies)


FONT = b"/Font <</F 4 0 R>>"
HELVETICA = b"<</Type /Font /Subtype /Type1 /BaseFont /Helvetica>>"
SHOW = b"BT /F 9 Tf (a) Tj ET\n"


def _forms() -> bytes:
    """A page that calls a form ten times, which calls the next ten times, and so on."""
    depth = 9
    calls = [b"".join(b"/X%d Do\n" % (level + 1) for _ in range(10)) for level in range(depth)]
    names = b" ".join(b"/X%d %d 0 R" % (level + 1, 4 + level) for level in range(depth))
    resources = b"/XObject <<%b>>" % names
    about = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources <<%b>>" % resources
    forms = [stream(calls[level] if level < depth else SHOW, about=about) for level in range(1, depth)]
    return paged([stream(calls[0])], 1, resources, *forms, stream(SHOW, about=about))


def _endless_font() -> bytes:
    """A font whose table of characters says the same 65,536 of them again and again."""
    ranges = (
        b"1 begincodespacerange <0000> <ffff> endcodespacerange\n"
        + (b"100 beginbfrange\n" + b"<0000> <ffff> <0000>\n" * 100 + b"endbfrange\n") * 2000
    )
    font = b"<</Type /Font /Subtype /Type0 /BaseFont /A /Encoding /Identity-H /ToUnicode 5 0 R>>"
    return paged([stream(b"BT /F 9 Tf <00410042> Tj ET")], 1, FONT, font, stream(ranges))


PDF_BOMBS: dict[str, Callable[[], bytes]] = {
    "70 MB of white space": lambda: paged([stream(b" " * 70_000_000)], 1),
    "80 MB of white space": lambda: paged([stream(b" " * 80_000_000)], 1),
    "70 MB of text": lambda: paged([stream(b"BT /F 9 Tf (" + b"a" * 70_000_000 + b") Tj ET")], 1, FONT, HELVETICA),
    "compressed five times": lambda: paged([stream(b" " * 70_000_000, times=5)], 1),
    "sixty streams of 70 MB": lambda: paged([stream(b" " * 70_000_000)] * 60, 60),
    "a million words": lambda: paged([stream(SHOW * 1_000_000)], 1, FONT, HELVETICA),
    "one stream on ten thousand pages": lambda: paged([stream(SHOW * 50_000)], 10_000, FONT, HELVETICA),
    "forms that call forms": _forms,
    "a font without end": _endless_font,
    "arrays in arrays": lambda: paged([stream(b"[" * 1_000_000)], 1),
    "dictionaries in dictionaries": lambda: raw_pdf(b"<</A " * 200_000),
    "a page that is its own parent": lambda: raw_pdf(
        b"<</Type /Catalog /Pages 2 0 R>>", b"<</Type /Pages /Count 1 /Parent 2 0 R /Kids [2 0 R]>>"
    ),
    "a billion pages": lambda: raw_pdf(
        b"<</Type /Catalog /Pages 2 0 R>>", b"<</Type /Pages /Count 1000000000 /Kids []>>"
    ),
    "a table of a billion objects": lambda: raw_pdf(b"<</Type /Catalog>>").replace(b"xref\n0 2", b"xref\n0 1000000000"),
    "a table that leads to itself": lambda: raw_pdf(b"<</Type /Catalog>>").replace(b"/Root", b"/Prev 45 /Root"),
}

HTML_BOMBS: dict[str, Callable[[], bytes]] = {
    "tags in tags": lambda: b"<b>" * 499_000,
    "tags that never open": lambda: b"</b>" * 499_000,
    "tables in tables": lambda: b"<table><tr><td>" * 160_000,
    "paragraphs side by side": lambda: b"<p>x</p>" * 240_000,
    "a tag of very many attributes": lambda: b"<a " + b"".join(b"b%d=1 " % n for n in range(490_000)) + b">",
    "ampersands": lambda: b"<p>" + b"&" * 20_000_000,
    "references": lambda: b"<p>" + b"&#x41;" * 5_000_000,
    "references that do not end": lambda: b"<p>" + b"&a" * 10_000_000,
    "comments that never end": lambda: b"<!-- >" * 480_000,
    "declarations that never end": lambda: b"<![CDATA[ >" * 480_000,
    "instructions that never end": lambda: b"<? <" * 5_000 + b">" * 5_000,
    "white space": lambda: b"<p>" + b" " * 90_000_000 + b"x",
    "preformatted lines": lambda: b"<pre>" + b"\n" * 50_000_000 + b"x",
    "an encoding that is no text": lambda: b'<meta charset="zlib">' + zlib.compress(b" " * 20_000_000),
    "an encoding of quadratic time": lambda: b'<meta charset="punycode">' + b"a" * 2_000_000,
}
