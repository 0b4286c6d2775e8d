"""Middleware for LangChain's agents: what a tool retrieved is told to the model, packet by packet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables.config import run_in_executor

from kvpacket_rag import MissingExtraError
from langchain_kvpacket.call import packet_ids
from langchain_kvpacket.chat_model import ChatKVPacket

try:
    from langchain.agents.middleware import AgentMiddleware, ExtendedModelResponse, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingExtraError(
        "KVPacketMiddleware works inside agents of the package langchain, which is not installed or older than 1.0; "
        "pip install 'langchain>=1.0,<2'"
    ) from error

Answered = ModelResponse[Any] | AIMessage | ExtendedModelResponse[Any]


class KVPacketMiddleware(AgentMiddleware[Any, Any, Any]):
    """Hands the packets of retrieved documents to the model as hints.

    Documents come from the artifacts of tool messages, as tools with ``response_format="content_and_artifact"`` leave
    them. A hinted chunk that is then not reused is counted as a miss with the reason, and ``match="hints"`` looks for
    nothing else. Models other than :class:`ChatKVPacket` get their calls unchanged.

    Example:
        >>> tool = create_retriever_tool(retriever, "search", "Look it up.", response_format="content_and_artifact")
        ... # doctest: +SKIP
        >>> agent = create_agent(chat, [tool], middleware=[KVPacketMiddleware()])  # doctest: +SKIP
    """

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Answered:
        """Call the model with hints."""
        return handler(_hinted(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> Answered:
        """Call the model with hints; they are worked out in another thread."""
        return await handler(await run_in_executor(None, _hinted, request))


def _hinted(request: ModelRequest[Any]) -> ModelRequest[Any]:
    artifacts = [message.artifact for message in request.messages if isinstance(message, ToolMessage)]
    retrieved = list(_documents(artifacts))
    if not retrieved or not isinstance(request.model, ChatKVPacket):
        return request
    hints = [*(request.model_settings.get("kv_hint") or ()), *retrieved]
    ids = list(packet_ids(request.model.engine, hints))
    return request.override(model_settings={**request.model_settings, "kv_hint": ids})


def _documents(artifacts: Iterable[Any]) -> Iterator[Document]:
    """The documents in artifacts, however deep in lists and dictionaries, which may hold themselves."""
    seen: dict[int, Any] = {}  # keeps what an iterator gave, so that no two have one id
    left = list(artifacts)[::-1]
    while left:
        item = left.pop()
        if isinstance(item, Document):
            yield item
        elif id(item) not in seen and isinstance(item, Iterable) and not isinstance(item, str | bytes):
            seen[id(item)] = item
            left += list(item.values() if isinstance(item, Mapping) else item)[::-1]
