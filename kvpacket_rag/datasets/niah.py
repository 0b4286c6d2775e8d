"""Needles in a haystack: a fact hidden in one of several passages that have nothing to do with it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvpacket_rag.datasets.filler import filler_passage
from kvpacket_rag.datasets.sample import QASample, SourceText, Split
from kvpacket_rag.datasets.select import sentences
from kvpacket_rag.datasets.splits import draw, in_split
from kvpacket_rag.errors import DatasetError

_ADJECTIVES = (
    "amber ancient azure brave brisk calm candid clever copper coral crimson curious dapper distant dusty eager "
    "emerald fabled fearless frosty gentle gilded golden graceful hidden hollow humble ivory jolly keen lively lonely "
    "lucid marble mellow merry mighty misty modest noble nimble olive pearly placid polite proud quaint quiet rapid "
    "rosy rustic scarlet serene shiny silent silver sleepy snowy solemn speedy stormy sturdy sunny swift tender tidy "
    "velvet violet vivid wandering wild wise witty"
).split()
_NOUNS = (
    "acorn anchor badger balloon basket beacon bicycle bishop bridge cabin camel candle canyon castle cedar cello "
    "comet compass cottage cricket dolphin dragon eagle falcon ferry forest fountain fox garden glacier guitar hammer "
    "harbor heron island jacket kettle ladder lantern lighthouse lobster magnet maple market meadow mirror monkey "
    "mountain museum oak orchard otter owl oyster palace parrot pebble pepper piano pilot planet pony raven river "
    "rocket saddle salmon sparrow spider statue teapot temple thunder tiger tower tractor trumpet tulip turtle valley "
    "violin whale willow window wizard zebra"
).split()
_PASSWORDS = (
    "almond apricot banana basil biscuit butter caramel cardamom carrot cashew celery cherry chestnut chocolate "
    "cinnamon clover coconut coffee cucumber fennel garlic ginger grape hazelnut jasmine lavender lemon lentil mango "
    "melon mint mushroom mustard nectar nutmeg onion orange oregano papaya parsley peach peanut pineapple pistachio "
    "plum potato pumpkin radish raisin rosemary saffron sesame spinach sugar thyme tomato turnip vanilla walnut"
).split()
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


class _Kind(NamedTuple):
    value: Callable[[random.Random], str]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _word(rng: random.Random) -> str:
    return rng.choice(_PASSWORDS)


def _code(rng: random.Random) -> str:
    return f"{rng.choice(_LETTERS)}{rng.randrange(1000, 10_000)}"


_KINDS = {
    "number": _Kind(
        _number,
        (
            "One of the special magic numbers for {key} is: {value}.",
            "The special magic number for {key} is {value}.",
            "The special magic number for {key} mentioned here is: {value}.",
            "Remember that the special magic number for {key} is {value}.",
            "For {key}, the special magic number is {value}.",
            "Note: {value} is the special magic number for {key}.",
        ),
        (
            "What is the special magic number for {key} mentioned in the text?",
            "What is the special magic number for {key}?",
            "Which special magic number is given for {key}?",
        ),
    ),
    "word": _Kind(
        _word,
        (
            "The secret password for {key} is: {value}.",
            "The secret password for {key} is {value}.",
            "For {key}, the secret password is {value}.",
            'Remember that the secret password for {key} is "{value}".',
        ),
        (
            "What is the secret password for {key} mentioned in the text?",
            "What is the secret password for {key}?",
            "Which secret password is given for {key}?",
        ),
    ),
    "code": _Kind(
        _code,
        (
            "The access code for {key} is: {value}.",
            "The access code for {key} is {value}.",
            "To open {key}, use the access code {value}.",
            "For {key}, the access code is {value}.",
        ),
        (
            "What is the access code for {key} mentioned in the text?",
            "What is the access code for {key}?",
            "Which access code is given for {key}?",
        ),
    ),
}


def generate_niah(
    count: int,
    seed: int,
    haystack: Sequence[str] = (),
    *,
    chunks: int = 6,
    words_per_chunk: int = 80,
    split: Split = "train",
    other_needles: bool = True,
) -> list[QASample]:
    """Samples that each hide one fact in one of their passages.

    The fact ties a value, four times in five a number of seven digits, to a key, and the question asks for the
    value of the key. The place of the passage asked about is uniformly random. Keys, values and passages of the two
    splits are disjoint. More samples of a seed begin with the same ones.

    Args:
        count: of samples.
        seed: another seed gives other samples.
        haystack: texts to take passages from; without any, passages are made up.
        chunks: passages a sample.
        words_per_chunk: about as many words a passage, cut at sentence ends where there are any.
        split: "train" or "dev".
        other_needles: in a third of the samples, one or two other passages hold such a fact about another key.

    Raises:
        DatasetError: a count is below 1, or the haystack is too short for ``chunks`` passages.
    """
    if min(count, chunks, words_per_chunk) < 1:
        raise DatasetError(
            f"count is {count}, chunks {chunks} and words_per_chunk {words_per_chunk}; each should be 1 or more"
        )
    passages = _passages_of(haystack, words_per_chunk, split)
    if haystack and len(passages) < chunks:
        raise DatasetError(
            f"the haystack holds {len(passages)} passages of {words_per_chunk} words for the split {split!r}, but a "
            f"sample needs {chunks}; give more text, or fewer or shorter chunks"
        )
    samples = []
    for number in range(count):
        rng = random.Random(f"niah {split} {seed} {number}")
        if passages:
            chosen = rng.sample(passages, chunks)
        else:
            chosen = [filler_passage(rng, words_per_chunk, lambda text: in_split(text, split)) for _ in range(chunks)]
        samples.append(_hide(rng, chosen, split, f"niah-{split}-{seed}-{number}", other_needles))
    return samples


def haystack_from_folder(path: str | Path) -> list[str]:
    """The texts of all .txt and .md files in a folder and below, in the order of their paths.

    Raises:
        DatasetError: there is no such folder, it holds no text, or a file is not UTF-8.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DatasetError(f"{folder} is no folder; give one that holds .txt or .md files")
    texts = []
    for file in sorted(found for found in folder.rglob("*") if found.suffix.lower() in (".txt", ".md")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DatasetError(f"{file} cannot be read: {error}") from error
        if text.strip():
            texts.append(text)
    if not texts:
        raise DatasetError(f"{folder} holds no text; give a folder with .txt or .md files")
    return texts


def _hide(rng: random.Random, passages: list[str], split: Split, sample_id: str, other_needles: bool) -> QASample:
    """One sample: a needle in a passage, and perhaps others elsewhere."""
    name = rng.choices(list(_KINDS), weights=(80, 10, 10))[0]
    kind = _KINDS[name]
    others = min(rng.choice((0, 0, 0, 0, 1, 2)), len(passages) - 1) if other_needles else 0
    places = rng.sample(range(len(passages)), 1 + others)  # the first is asked about
    keys: list[str] = []
    values: list[str] = []
    while len(keys) < len(places):
        key = draw(rng, lambda rng: f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}", split)
        value = draw(rng, kind.value, split)
        if key not in keys and value not in values:
            keys.append(key)
            values.append(value)
    texts = list(passages)
    for place, key, value in zip(places, keys, values, strict=True):
        needle = rng.choice(kind.statements).format(key=key, value=value)
        texts[place] = _insert(rng, texts[place], needle)
    return QASample(
        sample_id=sample_id,
        question=rng.choice(kind.questions).format(key=keys[0]),
        answers=(values[0],),
        documents=tuple(SourceText("", text, place == places[0]) for place, text in enumerate(texts)),
        domain="niah",
        meta={"kind": name, "key": keys[0], "gold_position": places[0], "other_needles": others},
    )


def _insert(rng: random.Random, passage: str, needle: str) -> str:
    """The needle between two sentences of the passage, or at an edge."""
    pieces = [piece.strip() for piece in sentences(passage)]
    pieces.insert(rng.randint(0, len(pieces)), needle)
    return " ".join(pieces)


def _passages_of(haystack: Sequence[str], words: int, split: Split) -> list[str]:
    """The passages of a fifth of the texts for "dev", chosen by hash; of a single text, the last fifth."""
    texts = sorted(set(haystack), key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(texts) == 1:
        passages = _passages(texts[0], words)
        first = len(passages) * 4 // 5
        return passages[first:] if split == "dev" else passages[:first]
    first = min(len(texts), max(1, len(texts) // 5))
    chosen = texts[:first] if split == "dev" else texts[first:]
    return list(dict.fromkeys(passage for text in chosen for passage in _passages(text, words)))


def _passages(text: str, words: int) -> list[str]:
    """The text in passages of about that many words; a rest of half of them or less is left out."""
    passages: list[str] = []
    current: list[str] = []
    for sentence in sentences(text):
        found = sentence.split()
        if len(current) > words // 2 and len(current) + len(found) / 2 > words:
            passages.append(" ".join(current))
            current = []
        current += found
        while len(current) > words + words // 2:  # no sentence end for long: cut between words
            passages.append(" ".join(current[:words]))
            current = current[words:]
    if len(current) > words // 2:
        passages.append(" ".join(current))
    return passages
