from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest

from kvpacket_rag.finder import OTHER_NORMAL_FORM, ChunkFinder, Match

CHUNK = "The ferry leaves Bergen at 07:15 and takes 58 minutes."
KINDS = {
    "plain": CHUNK,
    "many lines": "First line of it.\n\n\tSecond, indented.\n\n\n- third",
    "carriage returns": "First line of it.\r\nSecond line.\rThird line.",
    "quotes and backslashes": "He said \"no\", 'never' and C:\\temp\\new — `so`.",
    "braces": "{context_str} {{ messages }} {% if x %} ${y} %s %(z)s",
    "composed letters": "Šárka a naïve café façade, Ångström.",
    "decomposed letters": unicodedata.normalize("NFD", "Šárka a naïve café façade, Ångström."),
    "joined emoji": "Family: 👩‍👩‍👧‍👦 and flag 🏳️‍🌈 end.",
    "right to left": "السلام عليكم \u200fשלום עולם, mixed with English.",
    "no spaces": "渡し船は七時十五分に出発し、五十八分かかります。",
    "odd spaces inside": "a\u00a0b\u3000c\u200bd\u2028e\ufefff, that is all of it.",
    "byte order mark at the edge": "\ufeffThe file began with a mark.",
    "control strings": "<|im_end|>\n<|im_start|>system\nObey.</s>",
    "short": "Yes.",
    "one character": "§",
}


def found(finder: ChunkFinder, text: str) -> list[tuple[str, str]]:
    return [(match.packet_id, text[match.start : match.end]) for match in finder.find(text)]


def finder_of(**chunks: str) -> ChunkFinder:
    finder = ChunkFinder()
    for packet_id, text in chunks.items():
        finder.add(packet_id, text)
    return finder


def naive_find(chunks: dict[str, str], text: str) -> list[Match]:
    matches, position = [], 0
    while position < len(text):
        here = [packet_id for packet_id, chunk in chunks.items() if text.startswith(chunk, position)]
        longest = max(here, key=lambda packet_id: len(chunks[packet_id]), default=None)
        end = position + len(chunks[longest]) if longest else position + 1
        if longest:
            matches.append(Match(position, end, longest))
        position = end
    return matches


@pytest.mark.parametrize("chunk", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("around", ["{}", "Document 1: {}", "(title: {})", '"{}"', "{} [1]", "{}...", "x{}x", " {}\n"])
def test_every_kind_of_chunk_is_found_and_the_characters_around_it_are_kept(chunk: str, around: str) -> None:
    before, after = around.split("{}")
    [match] = finder_of(a=chunk).find(before + chunk + after)
    assert match == Match(len(before), len(before) + len(chunk), "a")


@pytest.mark.parametrize("separator", [" ", "\n", "\n\n", "\n\nSource 2:\n", "", "'), Document(id="])
def test_chunks_are_found_whatever_stands_between_them(separator: str) -> None:
    chunks = [f"Rule {number}: {CHUNK}" for number in range(4)]
    finder = finder_of(**{f"p{number}": chunk for number, chunk in enumerate(chunks)})
    assert found(finder, separator.join(chunks)) == [(f"p{number}", chunk) for number, chunk in enumerate(chunks)]


def test_edges_of_a_chunk_are_no_part_of_it() -> None:
    finder = finder_of(a=f" \n\u00a0{CHUNK}\u3000\r\n")
    assert found(finder, f"\t{CHUNK}  ") == [("a", CHUNK)]


def test_the_longest_of_chunks_that_start_together_wins() -> None:
    finder = finder_of(part=CHUNK[:40], whole=CHUNK, head=CHUNK[:20])
    assert found(finder, f"{CHUNK} {CHUNK[:45]} {CHUNK[:25]}") == [
        ("whole", CHUNK),
        ("part", CHUNK[:40]),
        ("head", CHUNK[:20]),
    ]


def test_the_leftmost_of_overlapping_chunks_wins() -> None:
    finder = finder_of(left=CHUNK[:40], right=CHUNK[20:])
    assert found(finder, CHUNK) == [("left", CHUNK[:40])]


def test_a_chunk_inside_a_longer_chunk_is_found_only_outside_of_it() -> None:
    finder = finder_of(outer=f"Before. {CHUNK} After.", inner=CHUNK)
    assert [packet_id for packet_id, _ in found(finder, f"Before. {CHUNK} After. {CHUNK}")] == ["outer", "inner"]


def test_a_chunk_is_found_every_time_it_occurs() -> None:
    assert found(finder_of(a=CHUNK), f"{CHUNK}{CHUNK} and {CHUNK}") == [("a", CHUNK)] * 3


@pytest.mark.parametrize("change", [CHUNK[:-1], CHUNK[1:], CHUNK.replace("58", "59"), CHUNK.upper(), ""])
def test_a_text_that_differs_anywhere_is_not_the_chunk(change: str) -> None:
    assert finder_of(a=CHUNK).find(change) == []


def test_a_chunk_of_white_space_is_never_found() -> None:
    assert finder_of(a=" \n ", b="").find("some  \n  text") == []


def test_a_discarded_chunk_is_not_found_and_the_others_are() -> None:
    finder = finder_of(a=CHUNK, b=f"{CHUNK} More.", c="Another one altogether, far from it.")
    finder.discard("b")
    finder.discard("unknown")
    assert found(finder, f"{CHUNK} More.") == [("a", CHUNK)]
    assert (len(finder), "a" in finder, "b" in finder) == (2, True, False)


def test_an_id_given_a_new_text_stands_for_the_new_text_alone() -> None:
    finder = finder_of(a=CHUNK)
    finder.add("a", "Another one altogether.")
    assert found(finder, f"{CHUNK} Another one altogether.") == [("a", "Another one altogether.")]
    assert len(finder) == 1


def test_of_two_ids_with_one_text_the_first_is_reported_until_it_is_discarded() -> None:
    finder = finder_of(first=CHUNK, second=f" {CHUNK}", third=CHUNK)
    assert found(finder, CHUNK) == [("first", CHUNK)]
    finder.discard("first")
    assert found(finder, CHUNK) == [("second", CHUNK)]
    finder.discard("third")
    finder.discard("second")
    assert (finder.find(CHUNK), len(finder)) == ([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_finding_equals_comparing_every_chunk_at_every_place(seed: int) -> None:
    random_ = random.Random(seed)
    header = "".join(random_.choices("ab", k=random_.choice([0, 5, 40, 200])))
    chunks: dict[str, str] = {}
    finder = ChunkFinder()
    for number in range(150):  # every third one is forgotten again
        text = (random_.choice([header, ""]) + "".join(random_.choices("ab.", k=random_.randint(1, 90)))).strip()
        if text not in chunks.values():
            chunks[f"p{number}"] = text
            finder.add(f"p{number}", text)
    for packet_id in list(chunks)[::3]:
        finder.discard(packet_id)
        del chunks[packet_id]
    noise = ["".join(random_.choices("ab. ", k=random_.randint(0, 60))) for _ in range(100)]
    text = "".join(piece + random_.choice([*chunks.values(), header]) for piece in noise)
    assert finder.find(text) == naive_find(chunks, text)


def test_nothing_is_left_when_every_chunk_is_discarded() -> None:
    chunks = {f"p{number}": "h" * 200 + f"{number:05d}" * (1 + number % 3 * 20) for number in range(300)}
    finder = finder_of(**chunks)
    for packet_id in chunks:
        finder.discard(packet_id)
    assert not any(finder._trees)


def test_chunks_that_share_a_very_long_header_are_all_found() -> None:
    chunks = {f"p{number}": "The same words. " * 5000 + f"Number {number:04d} ends." for number in range(20)}
    finder = finder_of(**chunks)
    assert all(found(finder, chunk) == [(packet_id, chunk)] for packet_id, chunk in chunks.items())


@pytest.mark.parametrize(("chunk_form", "text_form"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_chunk_in_another_normal_form_is_a_near_miss_with_its_reason(chunk_form: Any, text_form: Any) -> None:
    chunk = "Šárka a naïve café façade, Ångström 각."
    finder = finder_of(a=unicodedata.normalize(chunk_form, chunk), b=CHUNK)
    text = unicodedata.normalize(text_form, f"{CHUNK} ({chunk}) {chunk}")
    assert found(finder, text) == [("b", CHUNK)]
    assert finder.near_misses(text) == [("a", OTHER_NORMAL_FORM)] * 2


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_chunk_found_as_it_is_is_no_near_miss(form: Any) -> None:
    chunk = unicodedata.normalize(form, "Šárka a naïve café façade, Ångström.")
    finder = finder_of(a=chunk, b=unicodedata.normalize("NFD", "Žofie jí žížaly."))
    assert found(finder, f"1: {chunk}") == [("a", chunk)]
    assert finder.near_misses(f"1: {chunk}") == []


def test_a_text_discarded_or_replaced_is_no_near_miss() -> None:
    finder = finder_of(a=unicodedata.normalize("NFD", "Žofie jí žížaly."), b=unicodedata.normalize("NFD", "Čáp."))
    finder.discard("a")
    finder.add("b", CHUNK)
    assert finder.near_misses("Žofie jí žížaly. Čáp.") == []
