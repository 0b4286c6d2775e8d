"""The teacher: the frozen model reading the same tokens with ordinary attention, answering greedily.

All questions of a row are answered side by side in one context, hidden from each other, so the context
is read once and a step decodes one token of every answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvpacket_rag.assemble import Context, Span
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.errors import ContextTooLongError, UnsupportedModelError
from kvpacket_rag.runner import BoundContext
from kvpacket_rag.training.answers_file import AnswersFolder
from kvpacket_rag.training.hidden import captured
from kvpacket_rag.training.objective import Targets
from kvpacket_rag.training.row import Row

ANSWER_TOKENS = 32  # of one answer, at most
_FORMAT = 2


@dataclass(slots=True)
class _Answering:
    """One question being answered.

    Attributes:
        place: slots and positions of the question and its answer.
        unread: tokens the model has not seen yet.
        taken: tokens it has seen.
        ids: the answer so far.
        found: for each of its tokens the top ids, their log-probabilities, and the hidden state if it is wanted.
    """

    place: Span
    unread: list[int]
    taken: int = 0
    ids: list[int] = field(default_factory=list)
    found: list[tuple[Tensor, ...]] = field(default_factory=list)


class Teacher:
    """Answers rows, and remembers its answers on disk.

    Args:
        backbone: the frozen model.
        folder: of the answers; None remembers nothing.
        top_k: log-probabilities kept of every token; the rest is kept as one mass.
        max_new_tokens: of one answer.
        hidden_layer: keep the hidden states that leave this layer, too.

    Raises:
        UnsupportedModelError: the model takes no mask, so several pieces cannot be read in one forward.
    """

    def __init__(
        self,
        backbone: Backbone,
        folder: Path | None = None,
        top_k: int = 64,
        max_new_tokens: int = ANSWER_TOKENS,
        hidden_layer: int | None = None,
    ) -> None:
        if not backbone.report.one_pass:
            raise UnsupportedModelError(
                f"{backbone.name} takes no attention mask of its own, so no adapter can be trained for it"
            )
        self._backbone = backbone
        self._folder = AnswersFolder(folder) if folder else None
        self._top_k = top_k
        self._max_new_tokens = max_new_tokens
        self._hidden_layer = hidden_layer

    def answer(self, row: Row) -> list[Targets]:
        """Greedy answers to every question of a row, with the teacher's distributions, on the host.

        Raises:
            ContextTooLongError: the row and its answers exceed the model's window.
        """
        if self._folder is None:
            return self._compute(row)
        name = self._name(row)
        answers = self._folder.read(name)
        if answers is None:
            answers = self._compute(row)
            self._folder.write(name, answers)
        return answers

    def _name(self, row: Row) -> str:
        backbone = self._backbone
        about = [_FORMAT, backbone.weights_fingerprint, self._top_k, self._max_new_tokens, self._hidden_layer]
        content = json.dumps([about, sorted(backbone.eos_ids), row.context_ids, row.suffixes])
        return hashlib.sha256(content.encode()).hexdigest()

    @torch.no_grad()
    def _compute(self, row: Row) -> list[Targets]:
        backbone = self._backbone
        room = [len(suffix) + self._max_new_tokens for suffix in row.suffixes]
        ids = row.context_ids
        if len(ids) + max(room) > backbone.context_window:
            raise ContextTooLongError(
                f"a row of {len(ids)} tokens with questions and answers of {max(room)} exceeds the "
                f"{backbone.context_window} positions of {backbone.name}; use fewer or shorter chunks"
            )
        context = backbone.pool.take(len(ids) + sum(room))
        try:
            bound = backbone.bind(context)
            backbone.prefill(bound, [(context.reserve(len(ids)), ids)])
            places = [Span(context.reserve(count).slot, len(ids), count) for count in room]
            for buffer in context.buffers:  # what is masked is multiplied by zero all the same, so it has to be finite
                buffer[..., len(ids) : context.num_slots, :].zero_()
            answers = [_Answering(place, list(s)) for place, s in zip(places, row.suffixes, strict=True)]
            going = answers
            while going:
                going = self._advance(bound, context, going)
            return [_targets(answer) for answer in answers]
        finally:
            backbone.pool.give_back(context)

    def _advance(self, bound: BoundContext, context: Context, going: list[_Answering]) -> list[_Answering]:
        """Add one token to every answer; those that go on."""
        ends = torch.tensor([len(a.unread) for a in going], device=self._backbone.device).cumsum(0) - 1
        layer = self._hidden_layer
        with self._backbone.runner.lock, ExitStack() as stack:
            seen = [] if layer is None else stack.enter_context(captured(self._backbone.model, layer))
            logits = self._read(bound, context, going, ends)
        hidden = [seen[-1][0, ends].float().cpu()] if seen else []
        log_probs = torch.log_softmax(logits.float(), -1)
        values, ids = log_probs.topk(min(self._top_k, log_probs.shape[-1]))
        for number, answer in enumerate(going):
            answer.found.append((ids[number].cpu(), values[number].cpu(), *(h[number] for h in hidden)))
            answer.ids.append(int(ids[number, 0]))
            answer.unread = answer.ids[-1:]
        ended = self._backbone.eos_ids
        return [a for a in going if a.ids[-1] not in ended and len(a.ids) < self._max_new_tokens]

    def _read(self, bound: BoundContext, context: Context, going: Sequence[_Answering], ends: Tensor) -> Tensor:
        """Read what is unread of every question; (questions, vocabulary) logits behind it."""
        device = self._backbone.device
        slots: list[int] = []
        starts: list[int] = []
        for answer in going:
            first = answer.place.slot + answer.taken
            slots += range(first, first + len(answer.unread))
            starts += [answer.place.slot] * len(answer.unread)
            answer.taken += len(answer.unread)
        shared = going[0].place.position  # slots of the context, which are its positions
        where, start, key = (torch.tensor(c, device=device) for c in (slots, starts, list(range(context.num_slots))))
        own = (key[None] >= start[:, None]) & (key[None] <= where[:, None])
        in_context = (key < shared)[None]
        positions = where - start + shared
        key_positions = torch.where(in_context, key[None], key[None] - start[:, None] + shared)
        mask = self._backbone.runner.additive(in_context | own, positions[:, None] - key_positions)
        ids = torch.tensor([[token for answer in going for token in answer.unread]], device=device)
        return bound.run(ids, where, positions[None], context.num_slots, mask, ends)[0]


def _targets(answer: _Answering) -> Targets:
    columns = [torch.stack(column) for column in zip(*answer.found, strict=True)]
    return Targets(torch.tensor(answer.ids), *columns)
