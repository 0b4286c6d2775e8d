"""Writes an answer: a context is filled, and tokens are decoded until an end token, a stop text or the limit."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvpacket_rag.answer import Answer, Miss, Timings, Usage
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.decode import GenerationSettings, Sampler, TextStream
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefiller
from kvpacket_rag.reading import Reuse, Way


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt that was read, and how it is to be answered.

    Attributes:
        parts: of the prompt.
        misses: found while it was read.
        settings: how to decode.
        reuse: what further misses do.
        policy: the way that was taken.
        reading: seconds that went into reading it.
    """

    parts: Sequence[Part]
    misses: tuple[Miss, ...]
    settings: GenerationSettings
    reuse: Reuse
    policy: Way
    reading: float


def write_answer(backbone: Backbone, prefiller: Prefiller, task: Task) -> Generator[str, None, Answer]:
    """Pieces of the answer as they become certain; the answer itself when there are no more.

    The context is given back whenever this ends, also when it is closed half-way.
    """
    started = time.perf_counter() - task.reading
    settings = task.settings
    sampler = Sampler(settings, lambda: prefiller.all_ids(task.parts), backbone.device)
    filled = prefiller.run(task.parts, settings.max_new_tokens)
    text = TextStream(backbone.decode, settings.stop)
    pieces: list[str] = []
    tokens: list[int] = []
    ends = backbone.eos_ids | backbone.control_ids(settings.stop)
    first_token = 0.0
    try:
        task.reuse.act_on(filled.misses)
        logits = filled.logits
        while not text.stopped and len(tokens) < settings.max_new_tokens:
            if tokens:
                logits = backbone.step(filled.bound, filled.context, tokens[-1])
            tokens.append(sampler.pick(logits))
            first_token = first_token or time.perf_counter() - started
            if tokens[-1] in ends:
                break
            if piece := text.push(tokens[-1]):
                pieces.append(piece)
                yield piece
        if piece := text.finish():
            pieces.append(piece)
            yield piece
    finally:
        backbone.pool.give_back(filled.context)
    reason: Literal["stop", "length"] = "stop" if text.stopped or tokens[-1] in ends else "length"
    loading = task.reading + filled.load_seconds
    times = Timings(loading, filled.assemble_seconds, first_token, time.perf_counter() - started)
    counts = filled.packet_tokens, filled.prefilled_tokens, len(tokens), len(filled.reused)
    usage = Usage(*counts, task.misses + filled.misses, filled.preamble_tokens)
    return Answer("".join(pieces), tuple(tokens), reason, usage, times, filled.reused, task.policy)
