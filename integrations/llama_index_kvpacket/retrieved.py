"""Nodes that LlamaIndex's retrievers found lately, and what a user is told of one that is not reused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index_instrumentation import get_dispatcher

from kvpacket_rag import KVPacketEngine
from kvpacket_rag.learner import Advice, as_python, as_python_beside_quotes

_KEPT_NODES = 1024  # and those that were found last, however many they are

ESCAPED = (
    "the prompt holds it with its line breaks and quotes escaped, as LlamaIndex's simple_summarize writes it; use "
    "KVPacketSynthesizer(response_mode='simple_summarize')"
)


ADVICE = Advice(
    not_encoded=(
        "it was retrieved and has no packet; a KVPacketTransform or a KVPacketPostprocessor makes packets that go with "
        "their documents"
    ),
    cut=(
        "the prompt holds a part of it alone, for LlamaIndex cut it to fit the window; set Settings.prompt_helper = "
        "BoundaryPromptHelper.from_llm(llm), or make smaller chunks"
    ),
    rewritten=tuple((rewrite, ESCAPED) for rewrite in (as_python, as_python_beside_quotes)),
)


class Found(list[BaseNode]):
    """What one retrieval found, the how manieth of this process it was, and for which engines a prompt reused some."""

    def __init__(self, nodes: Iterable[BaseNode] = (), number: int = 0) -> None:
        super().__init__(nodes)
        self.number = number
        self.reused_by: WeakSet[KVPacketEngine] = WeakSet()


class RetrievedNodes(BaseEventHandler):
    """Listens to every retriever of this process and keeps what was found last, whole.

    What the thread or task that asks a model retrieved last was found for its prompt; what others did may stand in it.
    """

    _found: deque[Found] = PrivateAttr(default_factory=deque)  # what each retrieval found, oldest first
    _count: int = PrivateAttr(default=0)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketRetrievedNodes"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Note what a retriever found."""
        if isinstance(event, RetrievalEndEvent):
            with self._lock:
                self._count += 1
                nodes = Found((scored.node for scored in event.nodes), self._count)
                _HERE.set(nodes)
                self._found.append(nodes)
                while len(self._found) > 1 and sum(map(len, self._found)) > _KEPT_NODES:
                    self._found.popleft()

    def listen(self) -> None:
        """Begin to listen; only once, however often it is called."""
        root = get_dispatcher()
        with self._lock:
            if self not in root.event_handlers:
                root.add_event_handler(self)

    @property
    def count(self) -> int:
        """How many retrievals there were until now."""
        return self._count

    def texts(self) -> list[str]:
        """Texts of the nodes as they are now: post-processors may have replaced some."""
        with self._lock:
            nodes = [node for found in self._found for node in found]
        return texts_of(nodes)

    def here(self) -> Found:
        """What the current thread or task retrieved last."""
        return _HERE.get()

    def forget(self, texts: Iterable[str]) -> None:
        """Nodes of these texts were deleted, and get no packets any more."""
        gone = {text.strip() for text in texts}
        with self._lock:
            for nodes in (*self._found, _HERE.get()):
                nodes[:] = [node for node in nodes if node.get_content(MetadataMode.NONE).strip() not in gone]

    def clear(self) -> None:
        """Forget them."""
        _HERE.set(Found())
        with self._lock:
            self._found.clear()


def texts_of(nodes: Iterable[BaseNode]) -> list[str]:
    """Their own texts, each once."""
    return list(dict.fromkeys(node.get_content(MetadataMode.NONE) for node in nodes))


_HERE: ContextVar[Found] = ContextVar("kvpacket_retrieved_nodes", default=Found())  # noqa: B039 - replaced whole
RETRIEVED = RetrievedNodes()
