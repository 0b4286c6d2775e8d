"""Writes an answer: a context is filled, and tokens are decoded until an end token, a stop text or the limit."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Literal

from torch import Tensor

from kvpacket_rag.answer import Answer, Timings, Usage
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.decode import Sampler, TextStream
from kvpacket_rag.device_errors import told
from kvpacket_rag.prefill import Prefilled, Prefiller
from kvpacket_rag.task import Task

NO_MEMORY = "retrieve fewer or shorter chunks, lower max_new_tokens, or free memory"


class Writing:
    """One answer in the making.

    Args:
        backbone: whose tokens it is made of.
        prefiller: knows the prompt's tokens.
        task: what is answered.
        started: when the prompt was handed over, by ``time.perf_counter``.

    Attributes:
        tokens: so far.
        done: nothing more is to be decoded.
    """

    def __init__(self, backbone: Backbone, prefiller: Prefiller, task: Task, started: float) -> None:
        settings = task.settings
        self._task = task
        self._started = started
        self._sampler = Sampler(settings, lambda: prefiller.all_ids(task.parts), backbone.device)
        self._text = TextStream(backbone.decode, settings.stop)
        self._ends = backbone.eos_ids | backbone.control_ids(settings.stop)
        self._pieces: list[str] = []
        self._first_token = self._last_token = 0.0
        self.tokens: list[int] = []
        self.done = False

    def take(self, logits: Tensor) -> str:
        """Choose the next token; text that has become certain by it.

        Args:
            logits: (1, vocabulary).
        """
        self.tokens.append(self._sampler.pick(logits))
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token
        ended = self.tokens[-1] in self._ends
        piece = "" if ended else self._text.push(self.tokens[-1])
        self.done = ended or self._text.stopped or len(self.tokens) == self._task.settings.max_new_tokens
        if self.done:
            piece += self._text.finish()
        self._pieces.append(piece)
        return piece

    def answer(self, filled: Prefilled) -> Answer:
        """What was written, once it is done.

        Args:
            filled: what it was decoded from.
        """
        task = self._task
        stopped = self._text.stopped or self.tokens[-1] in self._ends
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        ends = (moment - self._started for moment in (self._first_token, self._last_token))
        times = Timings(task.reading + filled.load_seconds, filled.assemble_seconds, *ends)
        counts = filled.packet_tokens, filled.prefilled_tokens, len(self.tokens), len(filled.reused)
        usage = Usage(*counts, task.misses + filled.misses, filled.preamble_tokens)
        return Answer("".join(self._pieces), tuple(self.tokens), reason, usage, times, filled.reused, task.policy)


def write_answer(
    backbone: Backbone, prefiller: Prefiller, task: Task, started: float | None = None
) -> Generator[str, None, Answer]:
    """Pieces of the answer as they become certain; the answer itself when there are no more.

    The context is given back whenever this ends, also when it is closed half-way.

    Args:
        backbone: the model.
        prefiller: of its engine.
        task: what is answered.
        started: see :class:`Writing`; by default now, less what the prompt took to read.

    Raises:
        PacketMissError: a chunk cannot be reused, and the task wants that to be an error.
        DeviceError: memory ran out, or the device disappeared.
    """
    started = time.perf_counter() - task.reading if started is None else started
    with told(backbone.device, NO_MEMORY):
        writing = Writing(backbone, prefiller, task, started)
        filled = prefiller.run(task.parts, task.settings.max_new_tokens)
        try:
            task.reuse.act_on(filled.misses)
            logits = filled.logits
            while not writing.done:
                if writing.tokens:
                    logits = backbone.step(filled.bound, filled.context, writing.tokens[-1])
                yield writing.take(logits)  # held back text, too, for it is here that a stream can be closed
        finally:
            backbone.pool.give_back(filled.context)
    return writing.answer(filled)
