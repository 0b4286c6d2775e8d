"""Finds the chunks of a store inside a text, character by character exact.

A dictionary on the first characters of every chunk says where one may begin; from there a tree of
dictionaries is descended, so chunks that share a long header cost no more than chunks that share nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A chunk is looked up by its first characters, as many of these as it has. Each width in use costs one pass over
# the text; wide ones almost never hit by chance, narrow ones are there for chunks too short for them.
_HEAD_WIDTHS = (32, 8, 1)
_BLOCK_WIDTH = 64  # characters compared at each step below the head
_LEAF_SIZE = 8  # chunks compared one by one before they are told apart by another block
_STRIDES = (16, 1024)  # positions looked up at once, after a match and at most: the next chunk is often close

OTHER_NORMAL_FORM = "other Unicode normal form"


@dataclass(frozen=True, slots=True)
class Match:
    """A known chunk inside a text: ``text[start:end]`` is exactly the chunk that ``packet_id`` stands for."""

    start: int
    end: int
    packet_id: str


class ChunkFinder:
    """The chunk texts a store knows, ready to be found inside prompts.

    Chunks are known by their text with white space stripped from the edges, so a chunk is found whatever a
    prompt template did around it. Adding and discarding take time in proportion to the chunk alone. If two
    packets are given the same text, the one added first is reported until it is discarded. Other threads may find
    while one adds and discards; at worst they overlook a chunk that is being moved.

    Args:
        forms_are_one: the tokenizer reads the Unicode normal forms of a text as the same tokens, so that a chunk is
            found in its composed and its decomposed form as well.
    """

    def __init__(self, forms_are_one: bool = False) -> None:
        self._forms_are_one = forms_are_one
        self._texts: dict[str, str] = {}  # packet id -> stripped text
        self._ids: dict[str, str] = {}  # stripped text, or a form of it -> packet id
        self._later: dict[str, list[str]] = {}  # the same -> ids that were given it too
        self._trees = tuple(_Branch(depth=0, width=width) for width in _HEAD_WIDTHS)
        self._composed: ChunkFinder | None = None  # the NFC form of every chunk that is in another form

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, packet_id: object) -> bool:
        return packet_id in self._texts

    def add(self, packet_id: str, text: str) -> None:
        """Make a chunk known, in place of what ``packet_id`` stood for; text of white space alone is never found."""
        text = text.strip()
        if self._texts.get(packet_id) == text:
            return
        self.discard(packet_id)
        self._texts[packet_id] = text
        for form in self._forms(text):
            if self._ids.setdefault(form, packet_id) != packet_id:
                self._later.setdefault(form, []).append(packet_id)
            elif form:
                self._tree(form).add(form)
        if not self._forms_are_one and not unicodedata.is_normalized("NFC", text):
            self._composed = self._composed or ChunkFinder()
            self._composed.add(packet_id, unicodedata.normalize("NFC", text))

    def discard(self, packet_id: str) -> None:
        """Forget a chunk; an unknown id is fine."""
        text = self._texts.pop(packet_id, None)
        if text is None:
            return
        if self._composed is not None:
            self._composed.discard(packet_id)
        for form in self._forms(text):
            self._discard_form(form, packet_id)

    def _discard_form(self, text: str, packet_id: str) -> None:
        later = self._later.get(text, [])
        if packet_id in later:
            later.remove(packet_id)
        elif later:
            self._ids[text] = later.pop(0)
        else:
            del self._ids[text]
            if text:
                self._tree(text).discard(text)
        if not later:
            self._later.pop(text, None)

    @contextmanager
    def also(self, texts: Iterable[str]) -> Iterator[ChunkFinder]:
        """Inside the ``with`` block these texts are found, too, under names of no packet."""
        names = {f"(text) {number}": text for number, text in enumerate(texts)}
        for name, text in names.items():
            self.add(name, text)
        try:
            yield self
        finally:
            for name in names:
                self.discard(name)

    def only(self, packet_ids: Iterable[str]) -> ChunkFinder:
        """A finder of these chunks alone; unknown ids are left out."""
        chosen = ChunkFinder(self._forms_are_one)
        for packet_id in packet_ids:
            if packet_id in self._texts:
                chosen.add(packet_id, self._texts[packet_id])
        return chosen

    def is_inside(self, packet_id: str, texts: Iterable[str]) -> bool:
        """Whether one of the texts holds the chunk of a known id."""
        chunk = self._texts.get(packet_id)
        return chunk is not None and any(form in text for text in texts for form in self._forms(chunk))

    def find(self, text: str) -> list[Match]:
        """The known chunks inside ``text``, in reading order and without overlap.

        The leftmost chunk wins, and of those that start at one place the longest. One chunk may be found many times.
        """
        matches: list[Match] = []
        trees = [tree for tree in self._trees if tree]
        position, stride = 0, _STRIDES[0]
        while trees and position < len(text):
            stop = min(position + stride, len(text))
            stride = min(2 * stride, _STRIDES[1])
            for start in _heads(trees, text, position, stop):
                # Every chunk of a wider tree is longer than any of a narrower one, so the first is the longest.
                chunk = next((found for tree in trees if (found := tree.longest(text, start))), None)
                if chunk and (packet_id := self._ids.get(chunk)):
                    stop, stride = start + len(chunk), _STRIDES[0]
                    matches.append(Match(start, stop, packet_id))
                    break
            position = stop
        return matches

    def near_misses(self, text: str) -> list[tuple[str, str]]:
        """Chunks that ``text`` holds only in other characters than their packet's: (packet id, reason) for each place.

        Such a chunk looks the same on paper but not to a tokenizer, so its packet does not stand for it; the reader
        should learn why nothing was reused. Free of cost where prompt and chunks are in Unicode's composed form NFC.
        """
        composed = unicodedata.normalize("NFC", text)
        if self._forms_are_one or (composed == text and not self._composed):
            return []
        matches = self.find(composed) + (self._composed.find(composed) if self._composed else [])
        matches.sort(key=lambda match: match.start)
        return [(m.packet_id, OTHER_NORMAL_FORM) for m in matches if self._texts.get(m.packet_id, text) not in text]

    def _forms(self, text: str) -> tuple[str, ...]:
        """The chunk, and what else the tokenizer takes for it."""
        if not self._forms_are_one or text.isascii():
            return (text,)
        return tuple(dict.fromkeys([text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFD"))]))

    def _tree(self, text: str) -> _Branch:
        return next(tree for tree in self._trees if tree.width <= len(text))


class _Branch:
    """Chunks that share their first ``depth`` characters, told apart by the ``width`` characters that follow.

    Attributes:
        children: next block -> the few chunks that have it, longest first, or the branch of the many that do.
        tails: rest of a chunk that ends before a full block -> that chunk.
        tail_lengths: length of a tail -> how many tails have it.
    """

    __slots__ = ("children", "depth", "tail_lengths", "tails", "width")

    def __init__(self, *, depth: int, width: int) -> None:
        self.depth = depth
        self.width = width
        self.children: dict[str, tuple[str, ...] | _Branch] = {}
        self.tails: dict[str, str] = {}
        self.tail_lengths: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.children or self.tails)

    def longest(self, text: str, start: int) -> str | None:
        """The longest chunk that ``text`` holds at ``start``. Every block on the way is compared whole."""
        branch, longest = self, None
        while True:
            position = start + branch.depth
            for length in sorted(branch.tail_lengths, reverse=True) if branch.tails else ():
                if (chunk := branch.tails.get(text[position : position + length])) is not None:
                    longest = chunk
                    break
            child = branch.children.get(text[position : position + branch.width], ())
            if isinstance(child, tuple):
                return next((chunk for chunk in child if text.startswith(chunk, start)), longest)
            branch = child

    def add(self, chunk: str) -> None:
        waiting: list[tuple[_Branch, str]] = [(self, chunk)]
        while waiting:
            branch, chunk = waiting.pop()
            block = branch._block(chunk)
            child = branch.children.get(block, ())
            if len(block) < branch.width:
                branch.tails[block] = chunk
                branch.tail_lengths[len(block)] = branch.tail_lengths.get(len(block), 0) + 1
            elif isinstance(child, _Branch):
                waiting.append((child, chunk))
            elif len(child) < _LEAF_SIZE:
                branch.children[block] = tuple(sorted((*child, chunk), key=len, reverse=True))
            else:
                deeper = _Branch(depth=branch.depth + branch.width, width=_BLOCK_WIDTH)
                branch.children[block] = deeper
                waiting.extend((deeper, each) for each in (*child, chunk))

    def discard(self, chunk: str) -> None:
        """Take out a chunk that was added, and every branch that is empty without it."""
        path: list[tuple[_Branch, str]] = []
        branch = self
        while len(block := branch._block(chunk)) == branch.width:
            path.append((branch, block))
            child = branch.children[block]
            if isinstance(child, tuple):
                branch.children[block] = tuple(each for each in child if each != chunk)
                break
            branch = child
        else:
            del branch.tails[block]
            branch.tail_lengths[len(block)] -= 1
            if not branch.tail_lengths[len(block)]:
                del branch.tail_lengths[len(block)]
        for branch, block in reversed(path):
            if branch.children[block]:
                break
            del branch.children[block]

    def _block(self, chunk: str) -> str:
        return chunk[self.depth : self.depth + self.width]


def _heads(trees: list[_Branch], text: str, start: int, stop: int) -> list[int]:
    """Places in ``[start, stop)`` where a chunk may begin, ascending."""
    places: set[int] = set()
    for tree in trees:
        width, heads = tree.width, tree.children
        places.update([place for place in range(start, stop) if text[place : place + width] in heads])
    return sorted(places)
