from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from kvpacket_rag.documents import Document
from kvpacket_rag.errors import DocumentError
from kvpacket_rag.split import Splitter

HANDBOOK = "# Leave\n\nTwenty days a year. Ask your lead first.\n\n## Sick leave\n\n- Call before nine.\n- Rest.\n\n"
TEXTS = {
    "prose": "".join(f"Sentence number {i} says little. " + "\n\n" * (i % 7 == 0) for i in range(300)),
    "markdown": HANDBOOK * 20,
    "table": "| item | price |\n|---|---|\n" + "| a pencil | 2 |\n" * 200,
    "fence": "```python\n" + "x = 1  # one\n" * 300 + "```\n",
    "chinese": "这是一个没有空格的句子。下一句话也很短,不是吗?" * 60,
    "unbroken": "a" * 3000 + "漢" * 500,
    "emoji": "👩‍👩‍👧‍👦🎈 e\u0301\u0301 " * 200,
    "white space": " \n\t \u00a0\u2028 \x1c\f \r\n" * 50 + "x" + "\n" * 5000 + "y",
    "control": "<|im_start|>user\nHi<|im_end|>\n" * 100,
}


def words(text: str) -> int:
    return len(text.split())


def utf8_bytes(text: str) -> int:
    return len(text.encode())


def visible(text: str) -> str:
    return "".join(text.split())


def random_text(seed: int) -> str:
    rng = random.Random(seed)
    marks = [(0x20, 0x20), (0x0A, 0x0A), (0x23, 0x2D)]  # spaces, line ends, what Markdown is made of
    ranges = [*marks, (0x01, 0x7F), (0x80, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0x1FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(2000))


@pytest.fixture(scope="module")
def bpe_count() -> Callable[[str], int]:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([HANDBOOK, TEXTS["prose"]], trainer)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["text", "markdown"])
@pytest.mark.parametrize("text", [*TEXTS.values(), *map(random_text, range(4))], ids=[*TEXTS, *"0123"])
def test_every_visible_character_is_in_exactly_one_chunk_and_no_chunk_is_over(
    text: str, kind: str, bpe_count: Callable[[str], int]
) -> None:
    document = Document("d", text, {"kind": kind})
    for count, max_tokens in ((bpe_count, 64), (bpe_count, 8), (utf8_bytes, 40)):
        chunks = Splitter(count).split(document, max_tokens)
        assert visible("".join(chunk.text for chunk in chunks)) == visible(text)
        assert all(0 < count(chunk.text) <= max_tokens and chunk.text == chunk.text.strip() for chunk in chunks)


def test_chunks_are_pieces_of_the_text_named_and_numbered_in_order() -> None:
    chunks = Splitter(words).split(Document("a/b.md", HANDBOOK * 5, {"kind": "markdown", "title": "T"}), 20)
    assert [chunk.chunk_id for chunk in chunks] == [f"a/b.md#{i:04d}" for i in range(len(chunks))]
    for ordinal, chunk in enumerate(chunks):
        assert chunk.text in HANDBOOK * 5
        assert chunk.document_id == "a/b.md"
        assert chunk.metadata == {"kind": "markdown", "title": "T", "ordinal": ordinal}


def test_cuts_fall_between_paragraphs_where_those_fit() -> None:
    paragraphs = [f"Paragraph {i} has. Eight words, more or less." for i in range(9)]
    chunks = Splitter(words).split(Document("d", "\n\n".join(paragraphs)), 28)
    assert [chunk.text for chunk in chunks] == ["\n\n".join(paragraphs[i : i + 3]) for i in (0, 3, 6)]


def test_markdown_is_cut_at_headings() -> None:
    sections = [f"## Section {i}\n\n" + "word " * (8 + i) + "end." for i in range(4)]
    chunks = Splitter(words).split(Document("d", "\n\n".join(sections), {"kind": "markdown"}), 20)
    assert [chunk.text for chunk in chunks] == sections


def test_a_heading_goes_with_the_text_below_it() -> None:
    text = "Intro. " * 40 + "\n\n## Leave\n\n" + "Twenty days. " * 28 + "\n\n" + "More of it. " * 18
    chunks = [chunk.text for chunk in Splitter(words).split(Document("d", text, {"kind": "markdown"}), 64)]
    assert [chunk for chunk in chunks if "## Leave" in chunk] == [("## Leave\n\n" + "Twenty days. " * 28).strip()]


@pytest.mark.parametrize("seed", range(5))
def test_no_small_piece_is_left_beside_another(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [rng.choice(["", "# ", "## "]) + "word " * rng.choice([1, 2, 5, 30, 55, 70, 200]) for _ in range(60)]
    for kind in ("text", "markdown"):
        chunks = Splitter(words).split(Document("d", "\n\n".join(blocks), {"kind": kind}), 64)
        assert min(words(chunk.text) for chunk in chunks) >= 64 // 8


def test_the_same_text_is_cut_the_same_way() -> None:
    one, other = (Splitter(words).split(Document("d", TEXTS["prose"]), 30) for _ in range(2))
    assert one == other


def test_white_space_gives_no_chunk_and_a_short_text_one() -> None:
    assert Splitter(words).split(Document("d", " \n\f\x1c "), 5) == []
    assert [chunk.text for chunk in Splitter(words).split(Document("d", "\n One. \n"), 5)] == ["One."]


def test_overlap_repeats_the_end_of_the_chunk_before_and_loses_nothing() -> None:
    text = " ".join(f"w{i}" for i in range(500))
    chunks = [chunk.text.split() for chunk in Splitter(words).split(Document("d", text), 32, overlap=8)]
    assert all(len(chunk) <= 32 for chunk in chunks)
    for before, after in pairwise(chunks):
        assert 0 < len(set(before) & set(after)) <= 8
    assert sorted(set().union(*chunks)) == sorted(text.split())


@pytest.mark.parametrize("overlap", [0, 8])
def test_a_long_text_is_cut_window_by_window_without_a_seam(overlap: int) -> None:
    text = " ".join(f"w{i}" for i in range(40_000))  # several windows, no line and no sentence
    chunks = [chunk.text.split() for chunk in Splitter(words).split(Document("d", text), 128, overlap)]
    assert list(dict.fromkeys(word for chunk in chunks for word in chunk)) == text.split()
    assert {len(chunk) for chunk in chunks[:-1]} <= set(range(96, 129))


def test_chunks_longer_than_a_window_are_found_whole() -> None:
    lines = [f"{i} " + "word " * 200 for i in range(200)]
    chunks = Splitter(lambda text: text.count("\n") + 1).split(Document("d", "\n".join(lines)), 100)
    assert [chunk.text.count("\n") + 1 for chunk in chunks] == [88, 88, 24]  # 12 of 100 are kept for small pieces


def test_pdf_chunks_name_the_page_they_start_on() -> None:
    pages = ["one " * 10, "", "three " * 10 + "\n\nmore " + "three " * 15, "four"]
    text = "\n\n\f".join(pages)
    chunks = Splitter(words).split(Document("d", text, {"kind": "pdf"}), 16)
    pages_of = {word: chunk.metadata["page"] for chunk in chunks for word in chunk.text.split()[:1]}
    assert pages_of == {"one": 1, "three": 3, "more": 3}


def test_a_piece_cut_too_long_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " " * 50 + "word " * 500
    monkeypatch.setattr(Splitter, "_cut", lambda self, document, capacity, overlap: [(0, len(text))])
    chunks = Splitter(words).split(Document("d", text), 10)
    assert all(0 < words(chunk.text) <= 10 for chunk in chunks)
    assert visible("".join(chunk.text for chunk in chunks)) == "word" * 500


@pytest.mark.parametrize(
    ("max_tokens", "overlap", "reason"),
    [(0, 0, "max_tokens of 1 or more"), (-3, 0, "max_tokens of 1"), (8, 8, "from 0 to 7"), (8, -1, "from 0 to 7")],
)
def test_sizes_that_contradict_each_other_are_refused(max_tokens: int, overlap: int, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        Splitter(words).split(Document("d", "text"), max_tokens, overlap)


def test_a_character_too_large_for_any_chunk_is_named() -> None:
    with pytest.raises(DocumentError, match="'🎈' in document 'd' is 4 tokens by itself, over the 3"):
        Splitter(utf8_bytes).split(Document("d", "ab 🎈"), 3)


def test_an_error_of_the_count_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        Splitter(lambda text: len(text) // 0).split(Document("d", "some text"), 4)


@pytest.mark.parametrize("text", ["a" * 60_000, "a" + "\u0301" * 60_000, "漢字仮名" * 15_000, "0123456789" * 6_000])
def test_a_text_without_breaks_is_counted_a_few_times_over_and_no_more(text: str) -> None:
    counted = 0

    def count(piece: str) -> int:
        nonlocal counted
        counted += len(piece)
        return len(piece)

    chunks = Splitter(count).split(Document("d", text), 256)
    assert visible("".join(chunk.text for chunk in chunks)) == text
    assert counted < 30 * len(text)  # which grows with the length of the text where all that lies ahead is counted
