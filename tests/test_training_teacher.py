"""The teacher against a hand-written greedy loop, and what it remembers."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch.testing import assert_close
from training_samples import row

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import ContextTooLongError
from kvpacket_rag.training.objective import Targets
from kvpacket_rag.training.teacher import Teacher


def _greedy(backbone: Backbone, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    said: list[int] = []
    rows = []
    while len(said) < count and (not said or said[-1] not in backbone.eos_ids):
        with torch.no_grad():
            rows.append(torch.log_softmax(backbone.model(torch.tensor([[*ids, *said]])).logits[0, -1], -1))
        said.append(int(rows[-1].argmax()))
    return said, torch.stack(rows)


def _same(found: list[Targets], expected: list[Targets]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.answer, b.answer) and torch.equal(a.top_log_probs, b.top_log_probs) for a, b in pairs)


def test_every_question_is_answered_as_if_it_were_alone(backbone: Backbone) -> None:
    asked = row(backbone, 0, ("Who signed it?", "What does error E41 mean?", "When?"))
    answers = Teacher(backbone, top_k=512, max_new_tokens=7).answer(asked)
    for suffix, found in zip(asked.suffixes, answers, strict=True):
        said, log_probs = _greedy(backbone, [*asked.context_ids, *suffix], 7)
        assert found.answer.tolist() == said
        whole = torch.zeros_like(log_probs).scatter(-1, found.top_ids, found.top_log_probs)
        assert_close(whole, log_probs, atol=1e-3, rtol=1e-3)


def test_what_a_context_held_before_does_not_matter(backbone: Backbone) -> None:
    asked = row(backbone)
    expected = Teacher(backbone, max_new_tokens=5).answer(asked)
    for context in backbone.pool._idle:
        for buffer in context.buffers:
            buffer.fill_(float("nan"))
    assert _same(Teacher(backbone, max_new_tokens=5).answer(asked), expected)


def test_a_second_run_asks_the_model_nothing(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Teacher(backbone, tmp_path, hidden_layer=1).answer(row(backbone))
    monkeypatch.setattr(backbone.runner, "forward", None)
    again = Teacher(backbone, tmp_path, hidden_layer=1).answer(row(backbone))
    assert _same(again, first) and torch.equal(again[0].hidden, first[0].hidden)


@pytest.mark.parametrize("change", [{"top_k": 8}, {"max_new_tokens": 3}, {"hidden_layer": 0}])
def test_other_answers_are_not_mistaken_for_these(change: dict[str, int], backbone: Backbone, tmp_path: Path) -> None:
    Teacher(backbone, tmp_path).answer(row(backbone))
    Teacher(backbone, tmp_path, **change).answer(row(backbone))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def _zero_second_half(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def _flip_bits(content: bytes) -> bytes:
    first = 8 + int.from_bytes(content[:8], "little")  # behind the header
    return bytes(b ^ (0x40 if n >= first and not (n - first) % 97 else 0) for n, b in enumerate(content))


def _drop_an_answer(content: bytes) -> bytes:
    return save({name: tensor for name, tensor in load(content).items() if not name.startswith("1.")})


def _drop_the_checksum(content: bytes) -> bytes:
    return save({name: tensor for name, tensor in load(content).items() if name != "sha256"})


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:100], _zero_second_half, _flip_bits, _drop_an_answer, _drop_the_checksum],
    ids=["cut short", "half zero", "bits flipped", "an answer lost", "of before there were checksums"],
)
def test_a_damaged_file_is_made_again(damage: Callable[[bytes], bytes], backbone: Backbone, tmp_path: Path) -> None:
    first = Teacher(backbone, tmp_path).answer(row(backbone))
    (path,) = tmp_path.rglob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert _same(Teacher(backbone, tmp_path).answer(row(backbone)), first)
    assert path.read_bytes() == whole


def test_a_file_under_the_name_of_another_row_is_made_again(backbone: Backbone, tmp_path: Path) -> None:
    teacher = Teacher(backbone, tmp_path)
    answers = [teacher.answer(row(backbone, number)) for number in range(2)]
    one, other = tmp_path.rglob("*.safetensors")
    other.write_bytes(one.read_bytes())
    assert all(_same(teacher.answer(row(backbone, number)), answers[number]) for number in range(2))


def test_a_full_disk_is_told_once_and_loses_nothing(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    teacher = Teacher(backbone, tmp_path)
    with caplog.at_level(logging.WARNING):
        found = [teacher.answer(row(backbone, number)) for number in range(2)]
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert all(len(answers) == 2 for answers in found) and not list(tmp_path.rglob("*.*"))


def test_the_hidden_states_are_those_of_the_layer(backbone: Backbone) -> None:
    asked = row(backbone, 0, ("Who signed it?",))
    (found,) = Teacher(backbone, max_new_tokens=4, hidden_layer=0).answer(asked)
    ids = [*asked.context_ids, *asked.suffixes[0], *found.answer.tolist()]
    with torch.no_grad():
        states = backbone.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1][0]
    start = len(ids) - len(found.answer) - 1
    assert_close(found.hidden, states[start:-1], atol=1e-3, rtol=1e-3)


def test_a_row_longer_than_the_window_is_refused(backbone: Backbone) -> None:
    with pytest.raises(ContextTooLongError, match="2048 positions"):
        Teacher(backbone, max_new_tokens=2048).answer(row(backbone))
