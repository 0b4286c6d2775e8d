"""How an engine answers: a prompt or several, at once or piece by piece, from packets or in full."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from kvpacket_rag.answer import Answer, AnswerStream
from kvpacket_rag.batch import write_answers
from kvpacket_rag.break_even import measure_break_even
from kvpacket_rag.decode import GenerationSettings
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PromptError
from kvpacket_rag.learner import ChunkLearner
from kvpacket_rag.prefill import Prefiller
from kvpacket_rag.reading import Policy, Prompt, PromptReader, Reuse
from kvpacket_rag.store import MemoryStore, PacketStore
from kvpacket_rag.task import TaskReader, one_each
from kvpacket_rag.writing import write_answer

logger = logging.getLogger(__name__)


class Answering:
    """Answers prompts from the packets of a store; the half of a :class:`KVPacketEngine` that reads.

    Args:
        encoder: of the packets; makes those that are missing.
        store: where packets are kept.
        min_match_tokens: shorter chunks are not looked for in a prompt, for they occur by chance.
    """

    def __init__(self, encoder: PacketEncoder, store: PacketStore, min_match_tokens: int) -> None:
        self.backbone = backbone = encoder.backbone
        self.encoder = encoder
        self.store = store
        self.min_match_tokens = min_match_tokens
        self._prefiller = Prefiller(backbone, encoder, store)
        self._reader = PromptReader(backbone, store, encoder.signature, min_match_tokens)
        self._tasks = TaskReader(self._reader, self._prefiller)

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text by the model's own tokenizer, without special tokens."""
        return self.backbone.token_ids(text)

    def count_tokens(self, text: str) -> int:
        """How many they are."""
        return len(self.token_ids(text))

    def generate(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        *,
        policy: Policy = "packets",
        template_kwargs: Mapping[str, Any] | None = None,
        reuse: Reuse | None = None,
    ) -> Answer:
        """Answer a prompt; see :meth:`stream`."""
        return self.stream(prompt, settings, policy=policy, template_kwargs=template_kwargs, reuse=reuse).read_all()

    def stream(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        *,
        policy: Policy = "packets",
        template_kwargs: Mapping[str, Any] | None = None,
        reuse: Reuse | None = None,
    ) -> AnswerStream:
        """Answer a prompt piece by piece.

        Args:
            prompt: chat messages, rendered by the model's own template; or a final text, which gets
                the model's beginning-of-sequence token once. Chunks the store knows are found in it.
            settings: how to decode; greedy by default.
            policy: ``"packets"`` reuses what is stored; ``"prefill"`` reads the same text in full; ``"auto"`` takes
                the quicker of the two, see :attr:`break_even_tokens`, and the answer says which.
            template_kwargs: passed on to the chat template.
            reuse: which chunks may come from packets and what a miss does; all known ones and nothing by default.

        Raises:
            PromptError: the prompt is empty, its messages are malformed, or the policy is unknown.
            PacketMissError: a chunk cannot be reused, and ``reuse`` wants that to be an error.
            ContextTooLongError: prompt and answer exceed the window; nothing was computed.
        """
        task = self._tasks.read(prompt, settings, reuse, self._shortest(policy), template_kwargs)
        return AnswerStream(write_answer(self.backbone, self._prefiller, task))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationSettings | Sequence[GenerationSettings] | None = None,
        *,
        policy: Policy = "packets",
        template_kwargs: Mapping[str, Any] | None = None,
        reuse: Reuse | Sequence[Reuse] | None = None,
        max_slots: int = 16384,
    ) -> list[Answer]:
        """Answer several prompts in one decode loop, which reads the model's weights once a step for all of them.

        Args:
            prompts: each as :meth:`stream` takes it, with chunks of its own.
            settings: for all, or one a prompt.
            policy: see :meth:`stream`.
            template_kwargs: passed on to the chat template.
            reuse: for all, or one a prompt.
            max_slots: tokens of all contexts that are in memory at once, padding and answers included; prompts that
                are more are answered in several batches of like length.

        Returns:
            An answer a prompt, in order; their seconds count from the moment all were handed over.

        Raises:
            KVPacketError: as :meth:`stream`; one prompt that cannot be answered is an error for all.
        """
        started, shortest = time.perf_counter(), self._shortest(policy)
        each = zip(prompts, one_each("settings", settings, prompts), one_each("reuse", reuse, prompts), strict=True)
        tasks = [self._tasks.read(*asked, shortest, template_kwargs) for asked in each]
        return write_answers(self.backbone, self._prefiller, tasks, started, max_slots)

    def _shortest(self, policy: Policy) -> float:
        """Tokens of chunks below which a prompt is read in full; may measure, which is no time of a request's own."""
        match policy:
            case "packets":
                return 0
            case "prefill":
                return math.inf
            case "auto":
                return self.break_even_tokens
        raise PromptError(f"policy is {policy!r}, expected 'packets', 'prefill' or 'auto'")

    def may_reuse(self, text: str, policy: Policy) -> bool:
        """Whether a prompt of this text is long enough for packets, so that it pays to make some."""
        shortest = self._shortest(policy)
        return not shortest or shortest <= self.count_tokens(text)

    @cached_property
    def learner(self) -> ChunkLearner:
        """Sees to the packets of what frameworks retrieved; one for all that share the engine."""
        return ChunkLearner(self.encoder, self.store, self._reader, self.min_match_tokens)

    @cached_property
    def break_even_tokens(self) -> int:
        """Tokens of chunks from which packets give the first token sooner than full prefill.

        Measured when ``policy="auto"`` first asks for it, which takes a second or more; or set it yourself.
        """
        found = measure_break_even(self.backbone, self.encoder, on_disk=not isinstance(self.store, MemoryStore))
        logger.info("packets of %s are quicker than full prefill from %d tokens on", self.backbone.name, found)
        return found
