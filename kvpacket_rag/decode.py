"""From logits to text: settings, sampling by transformers' own processors, and text that is safe to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvpacket_rag.errors import PromptError


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How an answer is decoded; the only place such settings are read from.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: 0 takes the most likely token each time.
        top_p: smallest set of tokens with this much probability; 1 for all.
        top_k: this many most likely tokens; 0 for all.
        min_p: tokens with at least this share of the best one's probability; 0 for all.
        repetition_penalty: divides the logits of tokens already read or written; 1 for none.
        stop: texts at which the answer ends; they are cut from it.
        seed: of the draw; None for a new one each time.

    Raises:
        PromptError: a value is out of its range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.temperature, self.top_p, self.min_p, self.repetition_penalty)
        counts = (self.max_new_tokens, self.top_k, 0 if self.seed is None else self.seed)
        if not all(isinstance(n, int | float) for n in numbers) or not all(isinstance(n, int) for n in counts):
            raise PromptError(f"generation settings must be numbers, and counts and seed whole ones, found {self}")
        wrong = [
            (name, value, allowed)
            for name, value, allowed, fine in (
                ("max_new_tokens", self.max_new_tokens, "at least 1", self.max_new_tokens >= 1),
                (
                    "temperature",
                    self.temperature,
                    "0 or at least 0.001",
                    self.temperature == 0 or self.temperature >= 1e-3,
                ),
                ("top_p", self.top_p, "in (0, 1]", 0 < self.top_p <= 1),
                ("top_k", self.top_k, "0 or more", self.top_k >= 0),
                ("min_p", self.min_p, "in [0, 1]", 0 <= self.min_p <= 1),
                ("repetition_penalty", self.repetition_penalty, "0.001 or more", self.repetition_penalty >= 1e-3),
                ("seed", self.seed, "None, or 0 up to 2^63", self.seed is None or 0 <= self.seed < 2**63),
            )
            if not fine
        ]
        if wrong:
            raise PromptError("; ".join(f"{name} is {value}, expected {allowed}" for name, value, allowed in wrong))
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) and text for text in self.stop):
            raise PromptError(f"stop is {self.stop!r}, expected a tuple of strings that are not empty")


class Sampler:
    """Picks the next token as transformers' generation would with the same settings.

    Args:
        settings: of the answer.
        prompt_ids: gives the tokens of the prompt, chunks included; only the repetition penalty asks for them.
        device: of the logits.
    """

    def __init__(
        self, settings: GenerationSettings, prompt_ids: Callable[[], Sequence[int]], device: torch.device
    ) -> None:
        self._greedy = settings.temperature == 0
        self._processors = LogitsProcessorList()
        seen: Sequence[int] = ()
        if settings.repetition_penalty != 1.0:
            seen = prompt_ids()
            self._processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
        if not self._greedy:
            self._processors += _warpers(settings)
        self._seen = torch.tensor([list(seen)], dtype=torch.long, device=device)
        self._generator = torch.Generator(device=device)
        if settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(settings.seed)

    def pick(self, logits: Tensor) -> int:
        """The next token.

        Args:
            logits: (1, vocabulary).
        """
        scores = logits.float()
        if self._processors:
            scores = self._processors(self._seen, scores)  # type: ignore[arg-type]
        if self._greedy:
            token = scores.argmax(-1)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[:, 0]
        if self._processors:
            self._seen = torch.cat([self._seen, token[None]], 1)
        return int(token)


def _warpers(settings: GenerationSettings) -> list[Callable[..., Tensor]]:
    """In the order of transformers' own generation."""
    warpers: list[Callable[..., Tensor]] = []
    if settings.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers


class TextStream:
    """Turns tokens into text that can be shown at once.

    Holds back the bytes of an unfinished character and whatever could still become a stop text,
    so that the pieces joined are exactly the answer and nothing shown is taken back.

    Args:
        decode: token ids to text.
        stop: texts that end the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._prefix = (
            0  # decoding starts here, before what is new: decoders treat the start of a text in their own way
        )
        self._read = 0  # tokens whose text is already in _text
        self._text = ""
        self._shown = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that has become certain; empty while something may still change."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return self._take(now[len(before) :])

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._prefix : self._read])
        rest = self._take(self._decode(self._tokens[self._prefix :])[len(before) :])
        if self.stopped:
            return rest
        held = self._text[self._shown :]
        self._shown = len(self._text)
        return rest + held

    def _take(self, new: str) -> str:
        """Add text; return what may be shown of it."""
        if self.stopped:
            return ""
        search_from = max(0, len(self._text) - max((len(s) for s in self._stop), default=0))
        self._text += new
        cuts = [place for s in self._stop if (place := self._text.find(s, search_from)) >= 0]
        if cuts:
            self.stopped = True
            self._text = self._text[: min(cuts)]
            end = len(self._text)
        else:
            end = len(self._text) - self._held()
        shown, self._shown = self._text[self._shown : end], max(end, self._shown)
        return shown

    def _held(self) -> int:
        """Characters at the end that begin a stop text."""
        for length in range(max((len(s) for s in self._stop), default=1) - 1, 0, -1):
            tail = self._text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return len(tail)
        return 0
