"""Documents to chunks: cut where meaning breaks, counted in the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from kvpacket_rag.chunk import MIN_MATCH_TOKENS, Chunk
from kvpacket_rag.documents import Document
from kvpacket_rag.errors import DocumentError

# Before each cut the splitter looks at all that lies ahead, which takes time in the square of a text
# without line or sentence breaks. So it is shown this many characters at a time, or more for long chunks.
_WINDOW = 32_768
_ENOUGH = (2, 8)  # characters a token; of a text without breaks, all that lies ahead is one piece to be counted


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int  # in characters of the document's text
    end: int
    num_tokens: int


class Splitter:
    """Cuts documents into chunks of at most a given number of tokens.

    Cuts fall at the largest break that fits: headings and blocks in Markdown, else blank lines, lines,
    sentences, words, and characters where nothing larger is left. The text is kept as it stands, with
    edges stripped. Room is set aside for pieces of a few tokens, such as a heading parted from a
    section too long to go with it: they join a neighbour.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        """Count as the model will.

        Args:
            count: the number of tokens of a text, such as ``KVPacketEngine.count_tokens``.
        """
        self._count = count

    def split(self, document: Document, max_tokens: int, overlap: int = 0) -> list[Chunk]:
        """Cut one document; white space alone gives no chunk.

        A chunk's id is the document's id, "#" and its ordinal, counted from 0. Its metadata is the
        document's with "ordinal" and, for a PDF, "page": the page it starts on, counted from 1.

        Args:
            document: with metadata "kind": "markdown", its markup decides on the cuts.
            max_tokens: the most that ``count`` gives for the text of any chunk.
            overlap: the most tokens that a chunk repeats from the one before. With 0, every character
                that is not white space is in exactly one chunk.

        Raises:
            DocumentError: the sizes contradict each other, or one character is more than ``max_tokens``.
        """
        if max_tokens < 1:
            raise DocumentError(f"a chunk of at most {max_tokens} tokens holds nothing; give max_tokens of 1 or more")
        if not 0 <= overlap < max_tokens:
            raise DocumentError(
                f"an overlap of {overlap} tokens does not fit chunks of at most {max_tokens}; "
                f"give one from 0 to {max_tokens - 1}"
            )
        small = min(MIN_MATCH_TOKENS, max_tokens // 8)
        spans = self._cut(document, max(max_tokens - small, overlap + 1), overlap)
        pieces = [piece for start, end in spans for piece in self._fit(document, start, end, max_tokens)]
        for headings_wait in (True, False):
            pieces = self._join_small(document.text, pieces, small, max_tokens, headings_wait)
        return _chunks(document, pieces)

    def _cut(self, document: Document, capacity: int, overlap: int) -> Iterator[tuple[int, int]]:
        """Starts and ends of pieces within the capacity, found window by window."""
        kind = MarkdownSplitter if document.metadata.get("kind") == "markdown" else TextSplitter
        splitter = kind.from_callback(lambda piece: self._size(piece.strip(), capacity), capacity, overlap)
        text, start, window = document.text, 0, max(_WINDOW, 40 * capacity)
        while start < len(text):
            found = splitter.chunk_indices(text[start : start + window])
            following = min(start + window, len(text))
            if following < len(text) and found:
                last, _ = found.pop()  # the window's edge may have cut it short, so it opens the next window
                if last == 0 or not found:
                    window *= 2
                    continue
                following = start + last
            yield from ((start + at, start + at + len(piece)) for at, piece in found)
            start = following

    def _size(self, piece: str, capacity: int) -> int:
        """Tokens of a piece, or of enough of it to see that it is over the capacity, which is all that is asked."""
        for length in (each * capacity for each in _ENOUGH):
            if length < len(piece) and (num_tokens := self._count(piece[:length])) > capacity:
                return num_tokens
        return self._count(piece)

    def _fit(self, document: Document, start: int, end: int, max_tokens: int) -> Iterator[_Piece]:
        """The piece with its edges stripped, halved until it fits by our own count, whoever cut it."""
        body = document.text[start:end]
        start += len(body) - len(body.lstrip())
        body = body.strip()
        end = start + len(body)
        num_tokens = self._count(body) if body else 0
        if num_tokens > max_tokens:
            if len(body) == 1:
                raise DocumentError(
                    f"{body!r} in document {document.document_id!r} is {num_tokens} tokens by itself, over the "
                    f"{max_tokens} of a chunk; give a larger max_tokens"
                )
            middle = (start + end) // 2
            yield from self._fit(document, start, middle, max_tokens)
            yield from self._fit(document, middle, end, max_tokens)
        elif body:
            yield _Piece(start, end, num_tokens)

    def _join_small(
        self, text: str, pieces: list[_Piece], small: int, max_tokens: int, headings_wait: bool
    ) -> list[_Piece]:
        """Join each small piece to the one before, or the one after if it is a heading that may wait for it."""
        joined: list[_Piece] = []
        for piece in pieces:
            last = joined[-1] if joined else None
            waits = headings_wait and _is_heading(text[piece.start : piece.end])
            if last and (last.num_tokens < small or (piece.num_tokens < small and not waits)):
                num_tokens = self._count(text[last.start : piece.end])
                if num_tokens <= max_tokens:
                    joined[-1] = _Piece(last.start, piece.end, num_tokens)
                    continue
            joined.append(piece)
        return joined


def _is_heading(text: str) -> bool:
    return all(line.startswith("#") for line in text.splitlines() if line.strip())


def _chunks(document: Document, pieces: list[_Piece]) -> list[Chunk]:
    chunks = []
    page, counted = 1, 0
    for ordinal, piece in enumerate(pieces):
        metadata = {**document.metadata, "ordinal": ordinal}
        if document.metadata.get("kind") == "pdf":
            page += document.text.count("\f", counted, piece.start)
            counted = piece.start
            metadata["page"] = page
        text = document.text[piece.start : piece.end]
        chunks.append(Chunk(f"{document.document_id}#{ordinal:04d}", text, document.document_id, metadata))
    return chunks
