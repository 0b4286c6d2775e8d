"""Cases for the tests of evaluation: invented prompts over the chunks of ``conftest``, and what to compare."""

from __future__ import annotations

from typing import Any

import torch
from conftest import CHUNKS
from torch import Tensor

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chat import Message
from kvpacket_rag.evaluation.case import Case, State, release
from kvpacket_rag.evaluation.methods import Bench, parse_method

QUESTIONS = ("Who signed the lease?", "When are refunds paid?", "What is error E41?", "Which floor?")


def make_messages(question: int = 0, chunks: int = 4) -> list[Message]:
    """A system message, and chunks with titles between them before a question."""
    documents = "\n\n".join(f"Title {number}:\n{chunk}" for number, chunk in enumerate(chosen(question, chunks)))
    return [Message("system", "Answer from the text."), Message("user", f"{documents}\n\n{QUESTIONS[question]}")]


def chosen(question: int, chunks: int) -> list[str]:
    """Another order for every question."""
    return (CHUNKS[question:] + CHUNKS[:question])[:chunks]


def make_case(backbone: Backbone, question: int = 0, chunks: int = 4, max_new_tokens: int = 64) -> Case:
    """The chat of :func:`make_messages` in parts."""
    texts = chosen(question, chunks)
    return Case.from_chat(backbone, make_messages(question, chunks), texts, max_new_tokens=max_new_tokens)


def prefill(name: str, bench: Bench, case: Case) -> State:
    """What a method leaves; its memory is not given back, so that two states never share it."""
    return parse_method(name, bench).prefill(case)


def first_logits(name: str, bench: Bench, case: Case) -> Tensor:
    """(vocabulary,): of the first token."""
    state = prefill(name, bench, case)
    logits = state.logits[0].clone()
    release(bench.backbone, state)
    return logits


def own_logits(model: Any, ids: list[int]) -> Tensor:
    """(tokens, vocabulary): the model alone, without any cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def divergence(full: Tensor, other: Tensor) -> float:
    """KL of two rows of logits."""
    return float(
        torch.nn.functional.kl_div(other.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="sum")
    )
