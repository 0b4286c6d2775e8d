from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dataset_samples import ROW, write_rows

from kvpacket_rag.datasets.sample import QASample, SourceText, read_jsonl
from kvpacket_rag.errors import DatasetError


def row_without(key: str) -> dict[str, Any]:
    return {name: value for name, value in ROW.items() if name != key}


def test_a_line_becomes_the_sample_it_describes(tmp_path: Path) -> None:
    (sample,) = read_jsonl(write_rows(tmp_path / "leases.jsonl", [ROW]))
    assert (sample.sample_id, sample.question, sample.domain) == ("q1", "Who signed the lease?", "leases")
    assert sample.answers == ("Ada Marlow", "A. Marlow")
    assert sample.documents[0] == SourceText("Lease", "Ada Marlow signed the lease.", True)
    assert sample.meta == {"hops": 1}


def test_what_may_be_left_out_has_a_default(tmp_path: Path) -> None:
    row = {"question": "Q?", "answers": ["a"], "documents": [{"text": "t"}]}
    (sample,) = read_jsonl(write_rows(tmp_path / "x.jsonl", [row]))
    assert sample == QASample("x-1", "Q?", ("a",), (SourceText("", "t", False),), "x", {})


def test_samples_keep_the_order_of_the_file_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n\n".join(json.dumps({**ROW, "id": name}) for name in "cab") + "\n \n")
    assert [sample.sample_id for sample in read_jsonl(path)] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("name", "domain"), [("set/train.jsonl", "set"), ("set/dev.jsonl", "set"), ("set/b.jsonl", "b")]
)
def test_the_domain_is_the_folder_of_a_split_and_else_the_file(tmp_path: Path, name: str, domain: str) -> None:
    path = write_rows(tmp_path / name, [ROW])
    assert read_jsonl(path)[0].domain == domain
    assert read_jsonl(path, "mine")[0].domain == "mine"


def test_a_byte_order_mark_and_windows_line_ends_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n" + json.dumps({**ROW, "id": "q2"}).encode())
    assert [sample.sample_id for sample in read_jsonl(path)] == ["q1", "q2"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([1], "expected a JSON object, found a list"),
        (row_without("answers"), "'answers' should be a list, found nothing"),
        ({**ROW, "answers": "Ada"}, "'answers' should be a list, found a string"),
        ({**ROW, "answers": []}, "the list 'answers' is empty"),
        ({**ROW, "answers": ["Ada", " "]}, "answer 2 is empty"),
        ({**ROW, "answers": [1999]}, "answer 1 should be a string, found a number"),
        ({**ROW, "question": "\n"}, "'question' is empty"),
        (row_without("question"), "'question' should be a string, found nothing"),
        (row_without("documents"), "'documents' should be a list, found nothing"),
        ({**ROW, "documents": []}, "the list 'documents' is empty"),
        ({**ROW, "documents": ["text"]}, "document 1 should be an object"),
        ({**ROW, "documents": [{"text": ""}]}, "the text of document 1 is empty"),
        ({**ROW, "documents": [{"text": "t", "is_supporting": 1}]}, "'is_supporting' of document 1 should be true"),
        ({**ROW, "meta": []}, "'meta' should be an object, found a list"),
        ({**ROW, "id": None}, "'id' should be a string, found nothing"),
        (ROW, "the id 'q1' is that of line 1 too"),
    ],
)
def test_a_malformed_line_is_named_with_what_is_wrong(tmp_path: Path, bad: Any, reason: str) -> None:
    path = write_rows(tmp_path / "x.jsonl", [ROW, bad])
    with pytest.raises(DatasetError) as caught:
        read_jsonl(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"id": "\xff"}', "not UTF-8"),
        (json.dumps({**ROW, "id": "q2", "question": "\ud800"}).encode(), "lone surrogate"),
    ],
)
def test_a_line_that_is_no_text_or_no_json_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line)
    with pytest.raises(DatasetError, match=f"line 2: .*{reason}"):
        read_jsonl(path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match="is empty"):
        read_jsonl(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        read_jsonl(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("answers", "expected"), [(("Yes",), True), (("no", "No."), True), (("yes", "Paris"), False), (("Norway",), False)]
)
def test_yes_no_means_every_answer_is_one_of_the_two(answers: tuple[str, ...], expected: bool) -> None:
    assert QASample("s", "q", answers, (SourceText("", "t"),), "d").is_yes_no is expected
