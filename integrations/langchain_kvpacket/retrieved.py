"""Documents that LangChain's retrievers found lately, and what a user is told of one that is not reused.

LangChain hands a model a prompt and no word of what was retrieved for it. But every run of a retriever, chain, tool
or model is told to callbacks, with the run it belongs to. So the documents of a chain are known when its model is
asked, and a chain over any retriever reuses them without a change.
"""

from __future__ import annotations

import html
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.tracers.context import register_configure_hook

from kvpacket_rag.learner import Advice, as_python, as_python_beside_quotes

_KEPT_DOCUMENTS = 1024  # of one outermost run, and of those that are over
_KEPT_RUNS = 4096  # a stream that nobody closes never ends
V = TypeVar("V")

ESCAPED = (
    "the prompt holds it with its line breaks and quotes escaped, as Python writes a list of documents; put "
    "format_docs between retriever and prompt"
)


def _as_html(text: str) -> str:
    """As mustache escapes it."""
    return html.escape(text, quote=False).replace('"', "&quot;")


ADVICE = Advice(
    not_encoded=(
        "it was retrieved and has no packet; a KVPacketRetriever around the vector store or a KVPacketVectorStore "
        "makes packets that are kept"
    ),
    cut=(
        "the prompt holds a part of it alone; put whole documents into the prompt, as format_docs does, or make "
        "smaller chunks"
    ),
    rewritten=(
        (as_python, ESCAPED),
        (as_python_beside_quotes, ESCAPED),
        (
            _as_html,
            "the prompt holds it escaped for HTML, as mustache writes {{it}}; write {{{it}}}, or use another format",
        ),
    ),
)


class RetrievedDocuments(BaseCallbackHandler):
    """Listens to all runs of this process and keeps what retrievers found, by the outermost run it was found in.

    So runs at the same time know nothing of each other's documents. When an outermost run is over, as a retriever's is
    that was called by itself, its documents are known to whatever is asked later.
    """

    run_inline = True  # it only takes notes, which is no work for another thread

    def __init__(self) -> None:
        self._outermost: OrderedDict[UUID, UUID] = OrderedDict()  # of every run that goes on
        self._found: OrderedDict[UUID, deque[str]] = OrderedDict()
        self._held: OrderedDict[UUID, None] = OrderedDict()  # outermost runs of which a prompt held a document
        self._over: deque[str] = deque(maxlen=_KEPT_DOCUMENTS)
        self._asked: OrderedDict[UUID, tuple[str, UUID]] = OrderedDict()  # a model's run -> its prompt, its outermost
        self._lock = threading.Lock()
        self._is_listening = False

    def listen(self) -> None:
        """Begin to listen; only once, however often it is called."""
        with self._lock:
            if not self._is_listening:
                register_configure_hook(_LISTENER, inheritable=False)
                self._is_listening = True

    def of(self, prompt: str) -> tuple[list[str], list[str]]:
        """Texts of documents that were found for a prompt, and of those found lately in runs that are over."""
        with self._lock:
            runs = {outermost for asked, outermost in self._asked.values() if asked == prompt}
            found = [text for run in runs for text in self._found.get(run, ())]
            return found, list(self._over)

    def is_sequel(self, prompt: str, is_held: bool) -> bool:
        """Whether a prompt that holds nothing found for it follows one of the same run that does.

        So it is in ``map_reduce``, whose last prompt holds what the others made of the documents.
        """
        with self._lock:
            runs = {outermost for asked, outermost in self._asked.values() if asked == prompt}
            for run in runs if is_held else ():
                _keep(self._held, run, None)
            return not is_held and not runs.isdisjoint(self._held)

    def clear(self) -> None:
        """Forget all documents."""
        with self._lock:
            self._over.clear()
            self._found.clear()

    def forget(self, texts: Iterable[str]) -> None:
        """Documents of these texts were deleted, and get no packets any more."""
        gone = {text.strip() for text in texts}
        with self._lock:
            for found in (self._over, *self._found.values()):
                kept = [text for text in found if text.strip() not in gone]
                found.clear()
                found.extend(kept)

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note which run this one is part of."""
        self._begin(run_id, parent_run_id)

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """The same of a tool."""
        self._begin(run_id, parent_run_id)

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """The same of a retriever, which may ask others."""
        self._begin(run_id, parent_run_id)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note what was found."""
        texts = [document.page_content for document in documents if isinstance(document, Document)]
        with self._lock:
            outermost = self._outermost.get(run_id, parent_run_id or run_id)
            _keep(self._found, outermost, self._found.get(outermost) or deque(maxlen=_KEPT_DOCUMENTS))
            self._found[outermost].extend(texts)
        self._end(run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The run is over."""
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The run is over."""
        self._end(run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The run is over."""
        self._end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The run is over."""
        self._end(run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The run is over."""
        self._end(run_id)

    def on_llm_start(
        self, serialized: Any, prompts: list[str], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Note which run asks a text model what."""
        self._ask(run_id, parent_run_id, prompts[0])  # LangChain tells of each prompt by itself

    def on_chat_model_start(
        self,
        serialized: Any,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """The same of a chat model."""
        self._ask(run_id, parent_run_id, as_asked([message.text for message in messages[0]]))

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The model has answered."""
        with self._lock:
            self._asked.pop(run_id, None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The model will not answer."""
        with self._lock:
            self._asked.pop(run_id, None)

    def _begin(self, run: UUID, parent: UUID | None) -> None:
        with self._lock:
            _keep(self._outermost, run, self._outermost.get(parent, parent) if parent else run)

    def _ask(self, run: UUID, parent: UUID | None, prompt: str) -> None:
        with self._lock:
            _keep(self._asked, run, (prompt, self._outermost.get(parent, parent) if parent else run))

    def _end(self, run: UUID) -> None:
        with self._lock:
            if self._outermost.pop(run, run) == run:
                self._held.pop(run, None)
                self._over.extend(self._found.pop(run, ()))


def _keep(notes: OrderedDict[UUID, V], run: UUID, value: V) -> None:
    """Note something of a run, in place of the oldest note where there are too many."""
    notes[run] = value
    while len(notes) > _KEPT_RUNS:
        notes.popitem(last=False)


def as_asked(texts: Sequence[str]) -> str:
    """All texts of a prompt as one, to search it and to know it again."""
    return "\0".join(texts)


RETRIEVED = RetrievedDocuments()
# Its default is what every context sees, those of new threads included.
_LISTENER: ContextVar[RetrievedDocuments | None] = ContextVar("kvpacket_retrieved_documents", default=RETRIEVED)
