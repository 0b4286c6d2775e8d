"""Which of a sample's documents are shown, in which order, and how much of each."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from kvpacket_rag.datasets.sample import QASample, SourceText
from kvpacket_rag.errors import DatasetError

TokenIds = Callable[[str], Sequence[int]]

# The end of a sentence with the white space after it; the point of a single initial ("J. Doe") is none.
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])[.!?]+[\"'”’)\]]*\s+|\n+\s*")


def select_documents(
    sample: QASample,
    rng: random.Random,
    max_chunks: int,
    shuffle: bool = True,
    gold_position: int | None = None,
) -> list[SourceText]:
    """All supporting documents of a sample, filled up with distractors drawn at random.

    Args:
        sample: to choose from.
        rng: decides on distractors and order.
        max_chunks: the most documents, unless more are supporting: these are never left out.
        shuffle: a random order; otherwise the sample's own.
        gold_position: place of the first supporting document, from 0; the others keep their order around it.

    Raises:
        DatasetError: ``max_chunks`` is below 1, or there is no supporting document or no such place for it.
    """
    if max_chunks < 1:
        raise DatasetError(f"max_chunks is {max_chunks}; give 1 or more")
    supporting = [place for place, document in enumerate(sample.documents) if document.is_supporting]
    others = [place for place, document in enumerate(sample.documents) if not document.is_supporting]
    chosen = supporting + rng.sample(others, min(len(others), max(0, max_chunks - len(supporting))))
    if shuffle:
        rng.shuffle(chosen)
    else:
        chosen.sort()
    if gold_position is not None:
        if not supporting or not 0 <= gold_position < len(chosen):
            raise DatasetError(
                f"of the {len(chosen)} documents chosen from sample {sample.sample_id!r}, {len(supporting)} are "
                f"supporting, so none can stand at place {gold_position}"
            )
        chosen.remove(supporting[0])
        chosen.insert(gold_position, supporting[0])
    return [sample.documents[place] for place in chosen]


def cut_documents(
    documents: Sequence[SourceText], answers: Sequence[str], token_ids: TokenIds, max_tokens: int
) -> list[str]:
    """The documents' texts, each within a token budget; supporting ones keep the sentences with an answer."""
    keep = [answer for answer in answers if answer.strip().lower() not in ("yes", "no")]
    return [cut(document.text, token_ids, max_tokens, keep if document.is_supporting else ()) for document in documents]


def cut(text: str, token_ids: TokenIds, max_tokens: int, keep: Sequence[str] = ()) -> str:
    """A text within a token budget, its edges stripped.

    Sentences are kept from the start, as many as fit, after room has been set aside for those that hold one of
    the strings to keep. Where not one sentence fits, the cut falls between words, or in the middle of a single
    word that is too long.

    Args:
        text: of a document.
        token_ids: the model's tokenizer without special tokens.
        max_tokens: the most tokens of the result.
        keep: strings, found as whole words in any case.

    Raises:
        DatasetError: ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise DatasetError(f"a chunk of at most {max_tokens} tokens holds nothing; give max_tokens of 1 or more")

    def fits(piece: str) -> bool:
        return len(token_ids(piece.strip())) <= max_tokens

    if fits(text):
        return text.strip()
    pattern = _any_of(keep)
    pieces = sentences(text, pattern)
    kept = [place for place, piece in enumerate(pieces) if pattern and pattern.search(piece)]
    chosen: list[int] = []
    for place in kept:
        if fits(_join(pieces, [*chosen, place])):
            chosen.append(place)
    if kept and not chosen:
        return _cut_words(pieces[kept[0]], fits, pattern)
    for place in (place for place in range(len(pieces)) if place not in chosen):
        if not fits(_join(pieces, [*chosen, place])):
            break
        chosen.append(place)
    return _join(pieces, chosen).strip() if chosen else _cut_words(pieces[0], fits, pattern)


def sentences(text: str, whole: re.Pattern[str] | None = None) -> list[str]:
    """The sentences of a text with the white space after them, so that joined they are the text again.

    What ``whole`` matches is never parted, such as a name with an abbreviation in it.
    """
    held = [match.span() for match in whole.finditer(text)] if whole else []
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    ends = [end for end in ends if not any(start < end < stop for start, stop in held)]
    starts = [0, *ends]
    return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if start < end]


def _join(pieces: Sequence[str], places: Sequence[int]) -> str:
    return "".join(pieces[place] for place in sorted(places))


def _any_of(strings: Sequence[str]) -> re.Pattern[str] | None:
    choices = [re.escape(string.strip()) for string in strings if string.strip()]
    return re.compile(rf"(?<!\w)(?:{'|'.join(choices)})(?!\w)", re.IGNORECASE) if choices else None


def _cut_words(sentence: str, fits: Callable[[str], bool], pattern: re.Pattern[str] | None) -> str:
    """As many words as fit: from the start, or around what is to be kept if the start does not reach it."""
    found = pattern.search(sentence) if pattern else None
    head = _longest_start(sentence, fits)
    if found is None or found.end() <= len(head):
        return head.strip()
    anchor = found.start()
    before = sentence.rfind(" ", 0, max(0, anchor - len(head) // 2)) + 1
    around = _longest_start(sentence[before:], fits)
    if found.end() <= before + len(around):
        return around.strip()
    return _longest_start(sentence[anchor:], fits).strip()


def _longest_start(text: str, fits: Callable[[str], bool]) -> str:
    """The longest start of a text that fits, at the end of a word if it holds one."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    if not ends or not fits(text[: ends[0]]):
        ends = list(range(1, (ends[0] if ends else len(text)) + 1))
    low, high = 0, len(ends)  # ends[:low] fit, ends[high:] do not
    while low < high:
        middle = (low + high + 1) // 2
        if fits(text[: ends[middle - 1]]):
            low = middle
        else:
            high = middle - 1
    return text[: ends[low - 1]] if low else text[:1]
