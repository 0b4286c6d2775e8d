"""An answer, what it cost, and an answer on its way."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from kvpacket_rag.errors import KVPacketError


@dataclass(frozen=True, slots=True)
class Miss:
    """A chunk that was read again instead of reused.

    Attributes:
        packet_id: of the chunk.
        reason: in words a user can act on.
    """

    packet_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; left out are soft tokens, and white space between chunks that an adapter stands for.

    Attributes:
        packet_tokens: prompt tokens taken from the packets of chunks.
        prefilled_tokens: prompt tokens the model had to read.
        completion_tokens: tokens written.
        chunks_reused: chunks taken from packets.
        misses: chunks of the store that were read again, with the reason.
        preamble_tokens: prompt tokens before the first chunk that were kept from an earlier prompt, and text between
            chunks where a prompt begins with the same chunks as an earlier one.
    """

    packet_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    chunks_reused: int
    misses: tuple[Miss, ...] = ()
    preamble_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt, but for white space between chunks that an adapter stands for."""
        return self.packet_tokens + self.preamble_tokens + self.prefilled_tokens

    @property
    def sentence(self) -> str:
        """What was reused and why the rest was not, for logs: counts and reasons, no text."""
        reasons = "".join(f"; {reason}" for reason in dict.fromkeys(miss.reason for miss in self.misses))
        return (
            f"{self.packet_tokens} of {self.prompt_tokens} prompt tokens came from packets of {self.chunks_reused} "
            f"chunks; {len(self.misses)} chunks missed{reasons}"
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one request, counted from the moment the prompt was handed over.

    Attributes:
        load_seconds: finding chunks and reading their packets.
        assemble_seconds: realigning and concatenating them.
        ttft_seconds: until the first token was chosen, everything above included.
        total_seconds: until the last one.
    """

    load_seconds: float
    assemble_seconds: float
    ttft_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote.

    Attributes:
        text: without control tokens and without the stop text.
        token_ids: as generated, the ending token included.
        finish_reason: ``"stop"`` by an end token or a stop text, ``"length"`` by the limit.
        usage: tokens reused, read and written.
        timings: where the time went.
        packet_ids: of the chunks taken from packets, in the order of the prompt.
        policy: the way that was taken, ``"packets"`` or ``"prefill"``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    timings: Timings
    packet_ids: tuple[str, ...] = ()
    policy: Literal["packets", "prefill"] = "packets"


class AnswerStream(Iterator[str]):
    """Pieces of an answer as they become certain; joined, they are its text.

    Leaving it unfinished is safe: :meth:`close`, or letting go of it, frees the context. Nothing runs
    between two pieces, and the caller's gradient mode is never touched. One thread may read while
    another closes, as an event loop does with its worker threads.
    """

    def __init__(self, source: Generator[str, None, Answer]) -> None:
        self._source = source
        self._answer: Answer | None = None
        self._closed = False
        self._step = threading.Lock()

    def __next__(self) -> str:
        try:
            with self._step:
                while not self._closed:
                    if piece := next(self._source):
                        return piece
                raise StopIteration
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise StopIteration from None
        finally:
            if self._closed:  # closed by another thread while the step ran
                self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream is exhausted.

        Raises:
            KVPacketError: it is not.
        """
        if self._answer is None:
            raise KVPacketError("the answer is not finished; read the stream to its end first")
        return self._answer

    def read_all(self) -> Answer:
        """Read to the end and return the answer."""
        for _ in self:
            pass
        return self.answer

    def close(self) -> None:
        """Stop generating and free the context; a step that is running in another thread ends first."""
        self._closed = True
        if self._step.acquire(blocking=False):
            try:
                self._source.close()
            finally:
                self._step.release()
