"""The bytes of a file to its text: plain text and Markdown, and what all readers share.

Knows nothing of paths and folders. Every reader either gives the whole text or raises a
`DocumentError` whose message completes the sentence "the file …".
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpacket_rag.errors import DocumentError

_BOMS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds.

    Attributes:
        kind: "text", "markdown", "html" or "pdf".
        text: lines ended by ``\\n``; the pages of a PDF begin with a form feed after the first.
        title: as the file itself states it, if it does.
    """

    kind: str
    text: str
    title: str | None = None


def decode(data: bytes, encoding: str = "utf-8") -> str:
    """The text of a file in the encoding of its byte-order mark, else in the given one, without guesses."""
    mark, encoding = next(((mark, name) for mark, name in _BOMS if data.startswith(mark)), (b"", encoding))
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = len(mark) + error.start
        found = f"0x{data[at]:02x} at byte offset {at}"
        raise DocumentError(f"is not valid {encoding}: {found}; save it as UTF-8") from error
    except (LookupError, UnicodeError) as error:
        raise DocumentError(f"declares the encoding {encoding!r}, which is unknown; save it as UTF-8") from error
    if "\0" in text:
        at = len(mark) + len(text[: text.index("\0")].encode(encoding))
        raise DocumentError(
            f"holds a null character at byte offset {at}: it is binary, or UTF-16 without a byte-order mark; "
            "save it as UTF-8"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(data: bytes) -> Content:
    """The text of a plain file, which states no title."""
    return Content("text", decode(data))


def read_markdown(data: bytes) -> Content:
    """The text of a Markdown file with its markup; the title is the first ``# heading`` outside code."""
    text = decode(data)
    fenced = False
    for line in text.split("\n"):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and line.startswith(("# ", "#\t")):
            heading = line[1:].strip()
            unmarked = heading.rstrip("#")  # "# Title #" may close as it opens, but "# C#" does not
            return Content("markdown", text, unmarked.strip() if unmarked.endswith((" ", "\t")) else heading)
    return Content("markdown", text)


READERS: Mapping[str, Callable[[bytes], Content]] = {
    ".txt": read_text,
    ".md": read_markdown,
    ".markdown": read_markdown,
}
