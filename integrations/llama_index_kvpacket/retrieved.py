"""Nodes that LlamaIndex's retrievers found lately, and what a user is told of one that is not reused."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index_instrumentation import get_dispatcher

from kvpacket_rag.learner import Advice

_KEPT_NODES = 1024  # and those that were found last, however many they are

ESCAPED = (
    "the prompt holds it with its line breaks and quotes escaped, as LlamaIndex's simple_summarize writes it; use "
    "KVPacketSynthesizer(response_mode='simple_summarize')"
)


def _as_python(text: str) -> str:
    """As Python writes a text in a list."""
    return repr(text)[1:-1]


def _as_python_beside_quotes(text: str) -> str:
    """The same if there are both kinds of quotes around it, such as in metadata."""
    return repr(f"{text}'\"")[1:-4]


ADVICE = Advice(
    not_encoded=(
        "it was retrieved and has no packet; a KVPacketTransform or a KVPacketPostprocessor makes packets that go with "
        "their documents"
    ),
    cut=(
        "the prompt holds a part of it alone, for LlamaIndex cut it to fit the window; set Settings.prompt_helper = "
        "BoundaryPromptHelper.from_llm(llm), or make smaller chunks"
    ),
    rewritten=tuple((rewrite, ESCAPED) for rewrite in (_as_python, _as_python_beside_quotes)),
)


class RetrievedNodes(BaseEventHandler):
    """Listens to every retriever of this process and keeps what was found last, whole."""

    _found: deque[list[BaseNode]] = PrivateAttr(default_factory=deque)  # what each retrieval found, oldest first
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketRetrievedNodes"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Note what a retriever found."""
        if isinstance(event, RetrievalEndEvent):
            with self._lock:
                self._found.append([scored.node for scored in event.nodes])
                while len(self._found) > 1 and sum(map(len, self._found)) > _KEPT_NODES:
                    self._found.popleft()

    def listen(self) -> None:
        """Begin to listen; only once, however often it is called."""
        root = get_dispatcher()
        with self._lock:
            if self not in root.event_handlers:
                root.add_event_handler(self)

    def texts(self) -> list[str]:
        """Texts of the nodes as they are now: post-processors may have replaced some."""
        with self._lock:
            nodes = [node for found in self._found for node in found]
        return list(dict.fromkeys(node.get_content(MetadataMode.NONE) for node in nodes))

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._found.clear()


RETRIEVED = RetrievedNodes()
