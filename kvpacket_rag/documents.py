"""Files and folders to documents.

Nothing is guessed and nothing is lost in silence: a file that cannot be read as what its name says
is left out with a reason, and the files after it are still read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpacket_rag.errors import DocumentError
from kvpacket_rag.parser_process import SUFFIXES, ParserProcess
from kvpacket_rag.readers import READERS

_TITLE_CHARACTERS = 300  # every chunk of a document has its title beside it


@dataclass(frozen=True, slots=True)
class Document:
    """A text to cut into chunks.

    Attributes:
        document_id: unique in an index; a document added under the id of another replaces it.
        text: the whole text, lines ended by ``\\n``.
        metadata: JSON-serialisable facts kept beside the text. A file that was read has "source" (its
            path as it was reached), "title" (up to 300 characters) and "kind" ("text", "markdown", "html" or
            "pdf"). The text of kind "pdf" has a form feed at the start of each page after the first.

    Raises:
        DocumentError: text or id hold a lone surrogate, which no encoding and no tokenizer accepts.
    """

    document_id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("id", self.document_id), ("text", self.text)):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DocumentError(
                    f"the {name} of document {self.document_id!r} holds the lone surrogate "
                    f"{value[error.start]!r} at character {error.start}; remove it"
                ) from error

    @property
    def content_hash(self) -> str:
        """SHA-256 of the text in hexadecimal; equal for equal texts, whatever their ids."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def read_documents(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    on_skip: Callable[[Path, str], None],
    *,
    exclude: Iterable[str | os.PathLike[str]] = (),
    max_bytes: int = 100_000_000,
) -> Iterator[Document]:
    """Read .txt, .md, .markdown, .html, .htm and .pdf files, one at a time and in a fixed order.

    Folders are read with all that is below them, by sorted name, hidden entries left out; links are
    followed, and a file or folder reached twice is read once. A document's id is its file's absolute
    path, links resolved, with forward slashes: two files never share an id, and one file keeps its
    id whether it is named itself or found in a folder, so reading it again updates it.

    HTML and PDF are parsed in a process of its own, so that a file made to harm is left out with the reason: see
    :mod:`~kvpacket_rag.parser_process`. Archives are not unpacked.

    Args:
        paths: files and folders.
        on_skip: called with each file or folder left out and the reason why.
        exclude: files and folders to leave out, such as the index that the documents go into.
        max_bytes: size of the largest file read.

    Raises:
        DocumentError: at once, before anything is read, if a path does not exist.
    """
    roots = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    for root in roots:
        if not os.path.exists(root):
            raise DocumentError(f"{str(root)!r} does not exist or cannot be reached; name a file or a folder")
    excluded = {os.path.realpath(path) for path in exclude}
    return _read_files(_walk(roots, excluded, on_skip), on_skip, max_bytes)


def _read_files(files: Iterator[Path], on_skip: Callable[[Path, str], None], max_bytes: int) -> Iterator[Document]:
    with ParserProcess() as parsers:
        for path in files:
            try:
                document = _read_file(path, max_bytes, parsers)
            except DocumentError as error:
                on_skip(path, str(error))
            else:
                yield document


def _walk(roots: list[Path], excluded: set[str], on_skip: Callable[[Path, str], None]) -> Iterator[Path]:
    """The files at and below the roots; a stack instead of recursion, so that no depth is too deep."""
    seen: set[str] = set()
    stack = roots[::-1]
    while stack:
        path = stack.pop()
        real = os.path.realpath(path)
        if real in excluded:
            on_skip(path, "is excluded")
        elif real in seen:
            on_skip(path, "was reached before")
        elif os.path.isdir(path):
            stack.extend(reversed(_visible_entries(path, on_skip)))
        elif os.path.isfile(path):
            yield path
        else:  # opening a pipe would wait for ever
            on_skip(path, "is a broken link, or neither a file nor a folder")
        seen.add(real)


def _visible_entries(folder: Path, on_skip: Callable[[Path, str], None]) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    except OSError as error:
        on_skip(folder, f"cannot be listed ({error.strerror})")
        return []


def _read_file(path: Path, max_bytes: int, parsers: ParserProcess) -> Document:
    suffix = path.suffix.lower()
    if suffix not in (known := (*READERS, *SUFFIXES)):
        raise DocumentError(f"has the suffix {suffix!r}, which is none of {', '.join(known)}")
    data = _read_bytes(path, max_bytes)
    content = READERS[suffix](data) if suffix in READERS else parsers.parse(suffix, data)
    if not content.text.strip():
        raise DocumentError("holds no text but white space")
    metadata = {"source": path.as_posix(), "title": _shortened(content.title or path.stem), "kind": content.kind}
    return Document(Path(os.path.realpath(path)).as_posix(), content.text, metadata)


def _shortened(title: str) -> str:
    """A title, cut after a word where it is too long for one."""
    if len(title) <= _TITLE_CHARACTERS:
        return title
    start = title[: _TITLE_CHARACTERS - 1]
    return f"{start.rpartition(' ')[0].rstrip() or start}…"


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(max_bytes + 1) if size <= max_bytes else b""
    except OSError as error:
        raise DocumentError(f"cannot be read ({error.strerror})") from error
    if max(size, len(data)) > max_bytes:  # the second if it grew meanwhile
        raise DocumentError(f"is {size:,} bytes long, over the limit of {max_bytes:,}; split it or raise the limit")
    if not data:
        raise DocumentError("is empty")
    return data
