"""Agents of the package langchain over packets: retriever tools, the two-step agent, and the middleware's hints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest

pytest.importorskip("langchain")

import langchain_kvpacket
from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import BaseTool, create_retriever_tool, tool
from langchain_kvpacket import ChatKVPacket, KVPacketMiddleware, KVPacketRetriever, KVPacketVectorStore, format_docs
from langchain_samples import LLAMA_TOOLS, QUESTION, QWEN_TOOLS, WordEmbeddings, documents, script

from kvpacket_rag import KVPacketEngine, MissingExtraError, PacketMissError

Format = Literal["content", "content_and_artifact"]
ASKED: Any = {"messages": [HumanMessage(QUESTION)]}
TEMPLATES = {"qwen": QWEN_TOOLS, "llama": LLAMA_TOOLS}
CALLS = {
    "qwen": '<tool_call>\n{"name": "search", "arguments": {"query": "signed the lease"}}\n</tool_call>',
    "llama": '{"name": "search", "parameters": {"query": "signed the lease"}}',
}


@pytest.fixture
def store(soft_engine: KVPacketEngine) -> KVPacketVectorStore:
    odd = Document(id="odd", page_content='He said "lease"?\n\tYes: signed {twice}, é 👩‍👩‍👧 <b>&amp;</b>.')
    return KVPacketVectorStore.from_documents([*documents(), odd], WordEmbeddings(), engine=soft_engine)


@pytest.fixture
def chat(store: KVPacketVectorStore) -> ChatKVPacket:
    return ChatKVPacket(engine=store.engine, chat_template_kwargs={"chat_template": QWEN_TOOLS}, max_tokens=128)


def retriever_tool(store: KVPacketVectorStore, response_format: Format = "content", **options: Any) -> BaseTool:
    retriever = KVPacketRetriever(vectorstore=store, k=2)
    return create_retriever_tool(retriever, "search", "Look it up.", response_format=response_format, **options)


def last_facts(state: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = state["messages"][-1].response_metadata
    return facts


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
async def test_what_a_retriever_tool_found_comes_from_packets(
    store: KVPacketVectorStore, kind: str, response_format: Format, monkeypatch: pytest.MonkeyPatch
):
    chat = ChatKVPacket(engine=store.engine, chat_template_kwargs={"chat_template": TEMPLATES[kind]})
    agent = create_agent(chat, [retriever_tool(store, response_format)], middleware=[KVPacketMiddleware()])
    script(monkeypatch, store.engine, *[CALLS[kind], "Ada Marlow did."] * 2)
    for state in (agent.invoke(ASKED), await agent.ainvoke(ASKED)):
        assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
        assert state["messages"][-1].content == "Ada Marlow did."
        assert last_facts(state)["chunks_reused"] == 2 and last_facts(state)["misses"] == []


def test_a_tool_in_the_style_of_the_documentation_works_too(
    store: KVPacketVectorStore, chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch
):
    layout = PromptTemplate.from_template("Source: {row}\nContent: {page_content}")
    store.delete(["odd"])
    agent = create_agent(chat, [retriever_tool(store, document_prompt=layout)])
    script(monkeypatch, store.engine, CALLS["qwen"], "Ada Marlow did.")
    state = agent.invoke(ASKED)
    assert "Source: 1\nContent: Ada Marlow" in state["messages"][2].content
    assert last_facts(state)["chunks_reused"] == 2


async def test_an_agent_streams_its_answer(
    store: KVPacketVectorStore, chat: ChatKVPacket, monkeypatch: pytest.MonkeyPatch
):
    agent = create_agent(chat, [retriever_tool(store)])
    script(monkeypatch, store.engine, *[CALLS["qwen"], "Ada Marlow did."] * 2)
    told = [chunk for chunk, _ in agent.stream(ASKED, stream_mode="messages")]
    atold = [chunk async for chunk, _ in agent.astream(ASKED, stream_mode="messages")]
    for chunks in (told, atold):
        answers = [chunk.text for chunk in chunks if chunk.type == "AIMessageChunk"]
        assert "".join(answers) == "Ada Marlow did." and len(answers) > 3


@pytest.mark.parametrize(("response_format", "reused"), [("content", 0), ("content_and_artifact", 2)])
def test_hints_come_from_the_documents_of_artifacts(
    store: KVPacketVectorStore,
    chat: ChatKVPacket,
    response_format: Format,
    reused: int,
    monkeypatch: pytest.MonkeyPatch,
):
    hinted = chat.model_copy(update={"match": "hints"})
    agent = create_agent(hinted, [retriever_tool(store, response_format)], middleware=[KVPacketMiddleware()])
    script(monkeypatch, store.engine, CALLS["qwen"], "Ada Marlow did.")
    assert last_facts(agent.invoke(ASKED))["chunks_reused"] == reused


def changed(kind: str, found: list[Document]) -> tuple[Any, list[Document]]:
    texts = [document.page_content for document in found]
    return {"list": texts, "upper": "\n\n".join(texts).upper()}[kind], found


@pytest.mark.parametrize(("kind", "missed"), [("list", 1), ("upper", 2)])
def test_what_a_tool_changed_is_told_as_a_miss(
    store: KVPacketVectorStore, chat: ChatKVPacket, kind: str, missed: int, monkeypatch: pytest.MonkeyPatch
):
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[Any, list[Document]]:
        """Look something up."""
        return changed(kind, store.similarity_search(query, k=2))

    store.delete(["d0", "d2", "d3"])  # leaves a plain text and an odd one
    agent = create_agent(chat, [search], middleware=[KVPacketMiddleware()])
    script(monkeypatch, store.engine, CALLS["qwen"], "Ada Marlow did.", CALLS["qwen"])
    facts = last_facts(agent.invoke(ASKED))
    assert (facts["chunks_reused"], len(facts["misses"])) == (2 - missed, missed)
    assert "not in the prompt as it was encoded" in facts["misses"][0]["reason"]
    strict = create_agent(chat.model_copy(update={"on_miss": "error"}), [search], middleware=[KVPacketMiddleware()])
    with pytest.raises(PacketMissError, match="not in the prompt"):
        strict.invoke(ASKED)


def held_by_itself(found: list[Document]) -> list[Any]:
    """Deep, and in a circle."""
    circle: list[Any] = [*found]
    for _ in range(3000):
        circle = [circle]
    circle.append(circle)
    return circle


@pytest.mark.parametrize(
    "wrap",
    [list, tuple, lambda found: {"documents": found}, lambda found: [[found[0]], found], held_by_itself],
)
def test_documents_are_found_in_any_artifact(
    store: KVPacketVectorStore,
    chat: ChatKVPacket,
    wrap: Callable[[list[Document]], Any],
    monkeypatch: pytest.MonkeyPatch,
):
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, Any]:
        """Look something up."""
        found = store.similarity_search(query, k=2)
        return format_docs(found), wrap(found)

    agent = create_agent(chat.model_copy(update={"match": "hints"}), [search], middleware=[KVPacketMiddleware()])
    script(monkeypatch, store.engine, CALLS["qwen"], "Ada Marlow did.")
    assert last_facts(agent.invoke(ASKED))["chunks_reused"] == 2


@pytest.mark.parametrize("in_system", [True, False])
async def test_an_agent_that_retrieves_first_needs_no_tools(store: KVPacketVectorStore, in_system: bool):
    @dynamic_prompt
    def with_documents(request: Any) -> str:
        found = store.similarity_search(request.state["messages"][-1].text, k=3)
        return f"Answer from these documents.\n\n{format_docs(found)}" if in_system else "Answer."

    chat = ChatKVPacket(engine=store.engine, max_tokens=4)  # of a template without tools
    agent = create_agent(chat, [], middleware=[with_documents, KVPacketMiddleware()])
    for state in (agent.invoke(ASKED), await agent.ainvoke(ASKED)):
        assert last_facts(state)["chunks_reused"] == (3 if in_system else 0)


def test_an_agent_with_tools_over_a_model_without_says_what_to_do(store: KVPacketVectorStore):
    agent = create_agent(ChatKVPacket(engine=store.engine), [retriever_tool(store)])
    with pytest.raises(NotImplementedError, match="an agent without tools whose @dynamic_prompt"):
        agent.invoke(ASKED)
    shaped = create_agent(ChatKVPacket(engine=store.engine), [], response_format={"title": "a", "type": "object"})
    with pytest.raises(NotImplementedError, match="JsonOutputParser"):
        shaped.invoke(ASKED)


def test_other_models_are_called_as_ever(store: KVPacketVectorStore):
    answers = [AIMessage("", tool_calls=[{"name": "search", "args": {"query": "lease"}, "id": "1"}]), AIMessage("Ada.")]

    class Fake(GenericFakeChatModel):
        def bind_tools(self, *_: Any, **settings: Any) -> Any:
            assert "kv_hint" not in settings
            return self

    agent = create_agent(
        Fake(messages=iter(answers)), [retriever_tool(store, "content_and_artifact")], middleware=[KVPacketMiddleware()]
    )
    assert agent.invoke(ASKED)["messages"][-1].content == "Ada."


def test_without_langchain_the_middleware_alone_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "langchain_kvpacket.middleware", raising=False)
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    with pytest.raises(MissingExtraError, match="pip install 'langchain"):
        _ = langchain_kvpacket.KVPacketMiddleware
    with pytest.raises(AttributeError, match="has no attribute 'KVPacketAgent'"):
        _ = langchain_kvpacket.KVPacketAgent  # type: ignore[attr-defined]
