"""From what a caller asks to a task: a prompt in parts, how it is answered, and which way it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpacket_rag.answer import Miss
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.errors import PromptError
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefiller
from kvpacket_rag.reading import Prompt, PromptReader, Reuse, Way


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


@dataclass(frozen=True, slots=True)
class TaskReader:
    """Reads prompts for one engine; nothing is computed by the model.

    Attributes:
        reader: finds chunks.
        prefiller: knows what fits.
    """

    reader: PromptReader
    prefiller: Prefiller

    def read(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None,
        reuse: Reuse | None,
        shortest: float,
        template_kwargs: Mapping[str, Any] | None,
    ) -> Task:
        """Find the chunks of a prompt and decide on the way it takes.

        Args:
            prompt: a final text, or chat messages.
            settings: how to decode; greedy by default.
            reuse: which chunks may come from packets, and what a miss does.
            shortest: tokens of chunks below which the prompt is read in full; infinite where packets are not wanted.
            template_kwargs: for the chat template.

        Raises:
            PromptError: the prompt is empty or malformed, or settings or reuse are something else.
            PacketMissError: a chunk cannot be reused, and ``reuse`` wants that to be an error.
            ContextTooLongError: prompt and answer exceed the window.
        """
        started = time.perf_counter()
        settings = GenerationSettings() if settings is None else settings
        reuse = Reuse() if reuse is None else reuse
        for name, value, kind in (("settings", settings, GenerationSettings), ("reuse", reuse, Reuse)):
            if not isinstance(value, kind):
                raise PromptError(f"{name} is a {type(value).__name__}; pass {kind.__name__}(...) or None")
        parts, misses = self.reader.read(prompt, template_kwargs, reuse)
        way: Way = "packets"
        misses = () if shortest == math.inf else misses
        if sum(part.num_tokens for part in parts if part.packet_id) < shortest:
            way, parts = "prefill", [replace(part, packet_id=None) for part in parts]
        reuse.act_on(misses)
        self.prefiller.check_length(parts, settings.max_new_tokens)
        return Task(parts, misses, settings, reuse, way, time.perf_counter() - started)


def one_each(name: str, given: Any, prompts: Sequence[Prompt]) -> Sequence[Any]:
    """What is given for all prompts, or one by one, as one by one.

    Raises:
        PromptError: they are not as many as the prompts.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise PromptError(f"prompts is a {type(prompts).__name__}; pass a list of prompts")
    if not isinstance(given, list | tuple):
        return [given] * len(prompts)
    if len(given) != len(prompts):
        raise PromptError(f"{len(given)} {name} for {len(prompts)} prompts; pass one for all, or one each")
    return given
