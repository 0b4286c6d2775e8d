"""One call of a model, on its way to the engine and back."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.documents import Document

from kvpacket_rag import (
    Answer,
    AnswerStream,
    DiskStore,
    DocumentError,
    GenerationSettings,
    KVPacketEngine,
    Message,
    PromptError,
    RemoteStore,
    Reuse,
    TieredStore,
)
from kvpacket_rag.engine import Policy
from kvpacket_rag.learner import Prepared
from langchain_kvpacket.retrieved import ADVICE, RETRIEVED, as_asked

logger = logging.getLogger(__name__)

PROVIDER = "kvpacket"
_WORTH_REUSE = 100  # tokens of a prompt; shorter ones hold no retrieved text worth a warning
_NO_CHUNKS = (
    "nothing of a prompt of %d tokens was reused: the engine knows no chunks, and the prompt holds no document that a "
    "retriever found lately. Retrieve through a LangChain retriever, such as vectorstore.as_retriever(), or keep the "
    "texts in a KVPacketVectorStore over this engine, as in KVPacketVectorStore(embedding, engine=chat.engine)"
)
_NOT_HELD = (
    "nothing was reused: the prompt holds none of the %d documents retrieved for it word for word. Put their "
    "page_content into it unchanged, as format_docs does"
)
_MISSED = "no chunk of a prompt was reused; of one that might have been: %s"

Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Call:
    """How one call is to be answered."""

    settings: GenerationSettings
    policy: Policy
    template_kwargs: Mapping[str, Any]
    reuse: Reuse
    hints: tuple[str | Document, ...] = ()
    encode_retrieved: bool = True

    def stream(self, engine: KVPacketEngine, prompt: Prompt, note: Callable[[Answer], None]) -> AnswerStream:
        """The engine's answer on its way; raises what the engine raises.

        Args:
            engine: that answers.
            prompt: for the engine.
            note: called with the finished answer.
        """
        begun = self._begin(engine, prompt)
        stream = engine.stream(prompt, self.settings, **self._options(), reuse=begun.reuse)

        def counted() -> Generator[str, None, Answer]:
            yield from stream
            answer = begun.ended(engine, stream.answer)
            note(answer)
            return answer

        return AnswerStream(counted())

    def answers(
        self, engine: KVPacketEngine, prompts: Sequence[Prompt], note: Callable[[Answer], None]
    ) -> list[Answer]:
        """The engine's answers to several prompts, decoded together; arguments as of :meth:`stream`."""
        begun = [self._begin(engine, prompt) for prompt in prompts]
        reuse = [one.reuse for one in begun]
        found = engine.generate_batch(prompts, self.settings, **self._options(), reuse=reuse)
        answers = [one.ended(engine, answer) for one, answer in zip(begun, found, strict=True)]
        for answer in answers:
            note(answer)
        return answers

    def _options(self) -> dict[str, Any]:
        return {"policy": self.policy, "template_kwargs": self.template_kwargs or None}

    def _begin(self, engine: KVPacketEngine, prompt: Prompt) -> Begun:
        """See to the packets of what was retrieved for a prompt."""
        texts = tuple(hint.page_content for hint in self.hints if isinstance(hint, Document))
        reuse = Reuse(self.reuse.match, packet_ids(engine, self.hints), self.reuse.on_miss, texts)
        text = as_asked([prompt] if isinstance(prompt, str) else [message.content for message in prompt])
        own, others = RETRIEVED.of(text)
        if self.policy == "prefill" or reuse.match == "off":
            prepared = engine.learner.read_in_full(text, [*own, *others])
            return Begun(prepared.expected(reuse), prepared)
        encode = self.encode_retrieved and reuse.on_miss != "error" and engine.may_reuse(text, self.policy)
        prepared = engine.learner.prepare(text, own, others, ADVICE, encode=encode)
        is_held = any(found.strip() in text for found in own)
        unseen, is_watched = 0 if is_held else len(own), not RETRIEVED.is_sequel(text, is_held)
        return Begun(prepared.expected(reuse), prepared, unseen, is_watched)


@dataclass(frozen=True, slots=True)
class Begun:
    """A prompt that was seen to, on its way to the engine.

    Attributes:
        reuse: knows what was retrieved.
        prepared: what was done for it.
        unseen: how many documents were retrieved for a prompt that holds none of them.
        is_watched: users are told where nothing is reused.
    """

    reuse: Reuse
    prepared: Prepared
    unseen: int = 0
    is_watched: bool = False

    def ended(self, engine: KVPacketEngine, answer: Answer) -> Answer:
        """The engine's answer with what was done before; logged, and warned of."""
        answer = self.prepared.counted(answer)
        if self.is_watched:
            beside(engine).warn(engine, answer, self.prepared, self.unseen)
        logger.info("%s", answer.usage.sentence)
        return answer


@dataclass(slots=True)
class Beside:
    """What the users of an engine were told, through any model over it."""

    told: set[str] = field(default_factory=set)
    _content: tuple[int, str] | None = None  # revision of the store, and what it holds then

    def warn(self, engine: KVPacketEngine, answer: Answer, prepared: Prepared, unseen: int) -> None:
        """Tell why nothing was reused that might have been; each reason once.

        Args:
            engine: that answered.
            answer: what it reused.
            prepared: for the prompt.
            unseen: how many documents were retrieved for a prompt that holds none of them.
        """
        usage = answer.usage
        if usage.chunks_reused or prepared.encoded:
            return
        if reason := next((miss.reason for miss in usage.misses), ""):
            self.once(logging.WARNING, _MISSED, reason)
        elif unseen:
            self.once(logging.WARNING, _NOT_HELD, unseen)
        elif usage.prompt_tokens >= _WORTH_REUSE and not any(engine.store.known(engine.signature)):
            self.once(logging.WARNING, _NO_CHUNKS, usage.prompt_tokens)

    def content(self, engine: KVPacketEngine) -> str:
        """A digest of the packets in the engine's store, but for those that were made as prompts came.

        An answer makes these again where they are missing, so it does not depend on them.
        """
        revision = engine.store.revision()
        if self._content is None or self._content[0] != revision:
            names = {known.packet_id for known in engine.store.known(engine.signature)} - engine.learner.learned
            self._content = revision, hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()
        return self._content[1]

    def once(self, level: int, message: str, *facts: str | int) -> None:
        """Log a message; another time only if its words differ, which a number does not change."""
        kind = "\0".join([message, *(fact for fact in facts if isinstance(fact, str))])
        if kind not in self.told:
            self.told.add(kind)
            logger.log(level, message, *facts)


_beside: WeakKeyDictionary[KVPacketEngine, Beside] = WeakKeyDictionary()
_making = threading.Lock()


def beside(engine: KVPacketEngine) -> Beside:
    """What is kept of an engine, for as long as there is the engine."""
    with _making:
        if engine not in _beside:
            _beside[engine] = Beside()
        return _beside[engine]


def packets_at(engine: KVPacketEngine) -> str:
    """What tells an engine's packets from those of another, also in a later process: their place, or which they are."""
    store = engine.store.below if isinstance(engine.store, TieredStore) else engine.store
    if isinstance(store, RemoteStore):
        return store.url
    return str(store.folder) if isinstance(store, DiskStore) else beside(engine).content(engine)


def packet_ids(engine: KVPacketEngine, retrieved: Sequence[str | Document]) -> tuple[str, ...]:
    """Packet ids of what was retrieved: of documents by their text, if it can have a packet; ids stay as they are.

    Raises:
        PromptError: one is neither.
    """
    names = []
    for item in retrieved:
        if not isinstance(item, str | Document):
            raise PromptError(f"kv_hint holds a {type(item).__name__}; pass packet ids or Documents")
        if isinstance(item, str):
            names.append(item)
        else:
            with suppress(DocumentError):  # empty or longer than the window, so it has no packet
                names.append(engine.encoder.identify(item.page_content)[0])
    return tuple(dict.fromkeys(names))


def usage_counts(answer: Answer) -> dict[str, Any]:
    """What an answer's tokens came from, as JSON can hold it."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "packet_tokens": usage.packet_tokens,
        "preamble_tokens": usage.preamble_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "chunks_reused": usage.chunks_reused,
        "misses": [asdict(miss) for miss in usage.misses],
    }


def answer_facts(model: str, answer: Answer) -> dict[str, Any]:
    """What an answer cost, as JSON can hold it."""
    counts = usage_counts(answer)
    told = ("chunks_reused", "packet_tokens", "preamble_tokens", "prefilled_tokens", "misses")
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        **{name: counts[name] for name in told},
        "timings": asdict(answer.timings),
    }


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def as_tuple(name: str, values: Any, what: str) -> tuple[Any, ...]:
    """As a tuple; raises PromptError for what is none."""
    if isinstance(values, str | Document | Mapping) or not isinstance(values, Iterable):
        raise PromptError(f"{name} is a {type(values).__name__}; pass a list of {what}")
    return tuple(values)
