"""Rows as the student reads them: one forward in which every packet sees itself alone.

The layout is what serving assembles from packets, read at once: header and trailer take positions,
white space between packets is absorbed, text sees all that lies before it. Several rows stand in one
forward, hidden from each other, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.attach import OUTSIDE, attached
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.parts import absorb
from kvpacket_rag.training.objective import Targets
from kvpacket_rag.training.row import Row


@dataclass(slots=True)
class _Layout:
    """Tokens in the order of the forward.

    Attributes:
        embeddings: pieces of (tokens, hidden).
        roles: of each token, see :meth:`Adapter.roles`.
        rows, packets, branches: which row, packet (0: none) and question (0: the context) a token belongs to.
        hidden: whether only the token's own packet sees it.
        positions: what the rotary embedding sees.
        wanted: places that predict the tokens of the answers.
        spans: of the packets.
    """

    embeddings: list[Tensor] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    packets: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    spans: list[slice] = field(default_factory=list)

    def add(
        self, embeddings: Tensor, roles: Sequence[int], place: tuple[int, int, int], position: int, hidden: int = 0
    ) -> None:
        """Append tokens from ``position``; ``place`` is row, packet and question, the first ``hidden`` are hidden."""
        count = len(embeddings)
        if place[1]:
            self.spans.append(slice(len(self.rows), len(self.rows) + count))
        self.hidden += [number < hidden for number in range(count)]
        self.embeddings.append(embeddings)
        self.roles += roles
        for column, value in zip((self.rows, self.packets, self.branches), place, strict=True):
            column += [value] * count
        self.positions += range(position, position + count)

    def mask(self, device: torch.device) -> Tensor:
        """(tokens, tokens), True where a token may look."""
        rows, packets, branches = (torch.tensor(c, device=device) for c in (self.rows, self.packets, self.branches))
        order = torch.arange(len(rows), device=device)
        same_row = rows[:, None] == rows[None]
        in_packet = packets[:, None] == packets[None]
        in_branch = (branches[None] == 0) | (branches[:, None] == branches[None])
        in_branch &= ~torch.tensor(self.hidden, device=device)[None]
        own = torch.where(packets[:, None] > 0, in_packet, in_branch)
        return same_row & own & (order[:, None] >= order[None])


@contextmanager
def student_logits(
    backbone: Backbone, adapter: Adapter, rows: Sequence[Row], answers: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits with which packets predict given answers; gradients reach the adapter.

    The backward pass has to run within it: the model is locked meanwhile, and the adapter in place for
    activations that are computed again.

    Args:
        backbone: the frozen model.
        adapter: in training.
        rows: to be read in one forward.
        answers: for each row and question the tokens of the answer.

    Yields:
        Logits (answer tokens, vocabulary), rows and questions in order, and (answer tokens,) the places in the
        forward that predict them.
    """
    layout = _Layout()
    for number, (row, texts) in enumerate(zip(rows, answers, strict=True)):
        _lay_out(layout, number, row, texts, backbone, adapter)
    device = backbone.device
    embeddings = torch.cat(layout.embeddings)[None]
    roles = torch.tensor([layout.roles], device=device)
    positions, wanted = (torch.tensor(c, device=device) for c in (layout.positions, layout.wanted))
    with (
        backbone.runner.lock,
        attached(adapter, backbone.model, roles),
        backbone.reading(embeddings, layout.mask(device), positions, wanted, layout.spans) as logits,
    ):
        yield logits[0], wanted


def _lay_out(
    layout: _Layout, number: int, row: Row, answers: Sequence[Sequence[int]], backbone: Backbone, adapter: Adapter
) -> None:
    left_out = adapter.left_out_tokens  # they take the places before the packet, which others hold as well
    position = left_out
    for packet, part in enumerate(absorb(row.context) if adapter.absorbs else row.context, start=1):
        embeddings, roles = backbone.embed(part.ids or []), [OUTSIDE] * part.num_tokens
        if part.packet_id is not None:
            embeddings, roles = adapter.wrap(embeddings), adapter.roles(part.num_tokens).tolist()
        hidden = left_out if part.packet_id else 0
        layout.add(embeddings, roles, (number, packet if part.packet_id else 0, 0), position - hidden, hidden)
        position += len(embeddings) - hidden
    for branch, (suffix, answer) in enumerate(zip(row.suffixes, answers, strict=True), start=1):
        if not answer:
            continue
        read = [*suffix, *answer[:-1]]
        layout.wanted += range(len(layout.rows) + len(suffix) - 1, len(layout.rows) + len(read))
        layout.add(backbone.embed(read), [OUTSIDE] * len(read), (number, 0, branch), position)


def packed(
    rows: Sequence[Row], targets: Sequence[list[Targets]], budget: int
) -> Iterator[tuple[list[Row], list[list[Targets]]]]:
    """Rows and their targets in groups of at most ``budget`` tokens; a longer row stands alone."""
    group: list[tuple[Row, list[Targets]]] = []
    for row, target in zip(rows, targets, strict=True):
        if group and sum(r.num_tokens for r, _ in group) + row.num_tokens > budget:
            yield [r for r, _ in group], [t for _, t in group]
            group = []
        group.append((row, target))
    if group:
        yield [r for r, _ in group], [t for _, t in group]
