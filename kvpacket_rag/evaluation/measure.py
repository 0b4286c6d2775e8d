"""One method on one prompt: its answer, how near it is to full prefill, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from kvpacket_rag.backbone import Backbone
from kvpacket_rag.evaluation.case import Case, State, decode, release, score
from kvpacket_rag.evaluation.methods import Method
from kvpacket_rag.evaluation.metrics import contains, exact_match, f1, fidelity, says_yes_or_no


@dataclass(frozen=True, slots=True)
class Told:
    """What full prefill answers: token ids, and the logits (tokens, vocabulary) they were chosen by."""

    ids: list[int]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of one method on one prompt.

    Attributes:
        answer: what it said.
        f1, em, contains: of that answer; see :mod:`kvpacket_rag.evaluation.metrics`.
        kl, agreement: against full prefill, on the greedy answer of full prefill.
        load_seconds, assemble_seconds, ttft_seconds: finding and reading packets; realigning and concatenating;
            until the first token was chosen, all included.
        flops: until the first token was chosen.
        recompute_ratio: share of the chunks' tokens that was read again.
        bytes_per_token: of the packets that were used, for each token of the chunks.
    """

    answer: str
    f1: float
    em: float
    contains: float
    kl: float
    agreement: float
    load_seconds: float
    assemble_seconds: float
    ttft_seconds: float
    flops: float
    recompute_ratio: float
    bytes_per_token: float


@contextmanager
def prefilled(backbone: Backbone, method: Method, case: Case) -> Iterator[State]:
    """The prompt as the method reads it; its memory is given back afterwards."""
    method.prepare(case)
    state = method.prefill(case)
    try:
        yield state
    finally:
        release(backbone, state)


def tell(backbone: Backbone, state: State, case: Case) -> Told:
    """What full prefill answers, from its state."""
    ids = decode(backbone, state, case.max_new_tokens)
    return Told(ids, score(backbone, state, ids))


def measure(backbone: Backbone, case: Case, state: State, told: Told, yes_no: bool) -> Measurement:
    """Answer from a state and compare.

    Args:
        backbone: that read the prompt.
        case: the prompt and its gold answers.
        state: the prompt as the method read it.
        told: the answer of full prefill.
        yes_no: the gold answers are yes or no.
    """
    logits = score(backbone, state, told.ids)
    near = fidelity(told.logits, logits)
    answer = backbone.decode(_answer(backbone, case, state, told.ids, logits.argmax(-1).tolist())).strip()
    tokens = max(1, case.num_document_tokens)
    return Measurement(
        answer=answer,
        f1=f1(answer, case.answers),
        em=exact_match(answer, case.answers),
        contains=(says_yes_or_no if yes_no else contains)(answer, case.answers),
        kl=near.kl,
        agreement=near.agreement,
        load_seconds=state.load_seconds,
        assemble_seconds=state.assemble_seconds,
        ttft_seconds=state.ttft_seconds,
        flops=state.flops.total,
        recompute_ratio=state.recomputed_tokens / tokens,
        bytes_per_token=state.packet_bytes / tokens,
    )


def _answer(backbone: Backbone, case: Case, state: State, told: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The method's greedy answer, from a state in which the answer of full prefill was just scored.

    As far as the two are the same, the context holds their keys and values already.

    Args:
        backbone: that read the prompt.
        case: says how long an answer may be.
        state: of the method.
        told: tokens of full prefill's answer.
        chosen: the method's most likely token at each place of it.
    """
    same = next((place for place, token in enumerate(chosen) if token != told[place]), len(told))
    if same == len(told):
        return list(told)
    answer = [*told[:same], chosen[same]]
    state.rewind()
    state.context.reserve(same)
    while answer[-1] not in backbone.eos_ids and len(answer) < case.max_new_tokens:
        answer.append(int(backbone.step(state.bound, state.context, answer[-1]).argmax(-1)))
    return answer
