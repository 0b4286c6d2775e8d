"""Chunks that LlamaIndex's retrievers found lately, whatever index they came from.

Prompts hold them word for word, or should. So a chunk that has no packet gets one when a prompt first holds it, and
one that a prompt holds in another form is a miss that the user is told of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index_instrumentation import get_dispatcher

from kvpacket_rag import KVPacketEngine, KVPacketError, MemoryStore, Miss, PacketNotFoundError

logger = logging.getLogger(__name__)

_KEPT_NODES = 256
_KEPT_BYTES = 2 * 2**30  # of packets in memory
_PASSING = "retrieved"  # an owner for a moment
_EDGE = 64  # characters at a chunk's start or end by which a part of it is recognised

ENCODED_NOW = "it was retrieved and had no packet, so it was encoded for this prompt; the next one reuses it"
NOT_ENCODED = (
    "it was retrieved and has no packet; a KVPacketTransform or a KVPacketPostprocessor makes packets that go with "
    "their documents"
)
ESCAPED = (
    "the prompt holds it with its line breaks and quotes escaped, as LlamaIndex's simple_summarize writes it; use "
    "KVPacketSynthesizer(response_mode='simple_summarize')"
)
CUT = (
    "the prompt holds a part of it alone, for LlamaIndex cut it to fit the window; set Settings.prompt_helper = "
    "BoundaryPromptHelper.from_llm(llm), or make smaller chunks"
)


class RetrievedNodes(BaseEventHandler):
    """Listens to every retriever of this process and keeps its last nodes."""

    _nodes: deque[BaseNode] = PrivateAttr(default_factory=lambda: deque(maxlen=_KEPT_NODES))
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketRetrievedNodes"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Note what a retriever found."""
        if isinstance(event, RetrievalEndEvent):
            with self._lock:
                self._nodes.extend(found.node for found in event.nodes)

    def listen(self) -> None:
        """Begin to listen; only once, however often it is called."""
        root = get_dispatcher()
        with self._lock:
            if self not in root.event_handlers:
                root.add_event_handler(self)

    def texts(self) -> list[str]:
        """Texts of the nodes as they are now, longest first: post-processors may have replaced some."""
        with self._lock:
            nodes = list(self._nodes)
        texts = {node.get_content(MetadataMode.NONE).strip() for node in nodes}
        return sorted(texts - {""}, key=len, reverse=True)


RETRIEVED = RetrievedNodes()


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done for a prompt before the engine read it.

    Attributes:
        held: packet ids of the retrieved chunks that it holds as they are.
        encoded: packet id to tokens of those that were encoded for it.
        misses: retrieved chunks that the engine cannot find in it.
        seconds: it took.
    """

    held: tuple[str, ...] = ()
    encoded: Mapping[str, int] = field(default_factory=dict)
    misses: tuple[Miss, ...] = ()
    seconds: float = 0.0


class ChunkLearner:
    """Sees to it that retrieved chunks have packets when a prompt holds them.

    Packets made here have no owner. In memory the oldest of them go when the store takes more than 2 GiB.

    Args:
        engine: encodes and keeps them.
    """

    def __init__(self, engine: KVPacketEngine) -> None:
        self._engine = engine
        self._learned: OrderedDict[str, None] = OrderedDict()  # least recently needed first
        self._lock = threading.Lock()
        RETRIEVED.listen()

    def prepare(self, texts: Iterable[str], encode: bool) -> Prepared:
        """Look for retrieved chunks in a prompt.

        Args:
            texts: of the prompt.
            encode: make packets of those that have none.
        """
        started = time.perf_counter()
        whole, lost = _look_for(RETRIEVED.texts(), "\0".join(texts))
        misses = [Miss(name, reason) for text, reason in lost if (name := self._name(text)[0])]
        held = {name: (text, num_tokens) for text in whole for name, num_tokens in [self._name(text)] if name}
        missing = {name: chunk for name, chunk in held.items() if name not in self._engine.store}
        self._touch(held)
        reason = self._encode({name: text for name, (text, _) in missing.items()}) if encode else NOT_ENCODED
        if reason:
            misses += [Miss(name, reason) for name in missing]
        encoded = {} if reason else {name: num_tokens for name, (_, num_tokens) in missing.items()}
        return Prepared(tuple(held), encoded, tuple(misses), time.perf_counter() - started)

    def _name(self, text: str) -> tuple[str, int]:
        """Packet id and tokens of a chunk; no id for one that cannot have a packet."""
        try:
            name, ids = self._engine.encoder.identify(text)
        except KVPacketError:
            return "", 0
        return name, len(ids)

    def _encode(self, texts: Mapping[str, str]) -> str:
        """Why it failed, or nothing."""
        if not texts:
            return ""
        try:
            self._engine.encode(list(texts.values()))
        except KVPacketError as error:
            logger.warning("%d retrieved chunks could not be encoded: %s", len(texts), error)
            return str(error)
        with self._lock:
            self._learned |= dict.fromkeys(texts)
        self._make_room()
        return ""

    def _touch(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                if name in self._learned:
                    self._learned.move_to_end(name)

    def _make_room(self) -> None:
        store = self._engine.store
        while isinstance(store, MemoryStore) and store.size_bytes > _KEPT_BYTES:
            with self._lock:
                if len(self._learned) < 2:
                    return
                oldest, _ = self._learned.popitem(last=False)
            with suppress(PacketNotFoundError):
                store.add_owner(oldest, _PASSING)
            store.drop_owners([_PASSING])  # deletes it, unless a node owns it by now


def _look_for(chunks: Sequence[str], prompt: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Chunks that a prompt holds whole, and those that it holds in another form only, with the reason.

    A chunk inside a longer one is part of that, so ``chunks`` come longest first.
    """
    whole, rest = [], prompt
    for chunk in chunks:
        if chunk in rest:
            whole.append(chunk)
            rest = rest.replace(chunk, "\0")
    found = set(whole)
    reasons = [(chunk, _why_lost(chunk, prompt, rest)) for chunk in chunks if chunk not in found]
    return whole, [(chunk, reason) for chunk, reason in reasons if reason]


def _why_lost(chunk: str, prompt: str, rest: str) -> str:
    literal = repr(chunk)[1:-1].replace("\\'", "'")
    if literal != chunk and literal in prompt.replace("\\'", "'"):
        return ESCAPED
    is_cut = len(chunk) >= 2 * _EDGE and (chunk[:_EDGE] in rest or chunk[-_EDGE:] in rest)
    return CUT if is_cut else ""
