"""Every response mode, chat engine and agent of LlamaIndex with every kind of chunk: reused, or missed and told.

Run with ``pytest -s`` to see the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CitationQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index_kvpacket import BoundaryPromptHelper, KVPacketLLM, KVPacketSynthesizer, KVPacketVectorStore
from llama_index_kvpacket.retrieved import RETRIEVED
from llama_index_samples import CHUNK_KINDS, QUESTION, ChunkKind, index_of, no_stray_loop  # noqa: F401

from kvpacket_rag import KVPacketEngine

WAYS = ["sync", "async", "streamed", "async streamed"]
HARD = [kind for kind in CHUNK_KINDS if kind.name in ("multi-line", "unicode", "trailing white space", "with metadata")]
OWN = ["compact", "refine", "tree_summarize", "simple_summarize"]
ONE_CHUNK_A_CALL = ["accumulate", "compact_accumulate"]
Ask = Callable[[Any, VectorStoreIndex, str], Any]


class OneQuestion(BaseQuestionGenerator):
    """Asks the one tool the question as it is."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...

    def generate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return [SubQuestion(sub_question=query.query_str, tool_name=tools[0].name)]

    async def agenerate(self, tools: Any, query: Any) -> list[SubQuestion]:
        return self.generate(tools, query)


class ScriptedAgent(KVPacketLLM):
    """Reads every prompt of an agent, but says what an able model would: call the tool, then answer."""

    async def _script(self, messages: Any) -> ChatResponse:
        await super().achat(messages)
        says = "Thought: Now I know.\nAnswer: Ada Marlow."
        if not (messages[-1].content or "").startswith("Observation:"):
            says = 'Thought: I need a tool.\nAction: library\nAction Input: {"input": "harbour office lease"}'
        return ChatResponse(message=ChatMessage(role="assistant", content=says), delta=says, raw={})

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        return await self._script(messages)

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        async def whole() -> Any:
            yield await self._script(messages)

        return whole()


async def ask(asked: Any, verb: str, way: str) -> str:
    """The whole answer of a query or chat engine in one of four ways."""
    method = f"a{verb}" if way.startswith("async") else verb
    if verb.endswith("chat") and "streamed" in way:
        method = method.replace("chat", "stream_chat")
    response = getattr(asked, method)(QUESTION)
    response = await response if method.startswith("a") else response
    if "streamed" not in way:
        return str(response)
    if method.startswith("a"):
        pieces = response.async_response_gen()
        return "".join([piece async for piece in pieces])
    return "".join(response.response_gen)


def mode(name: str, **settings: Any) -> Ask:
    def run(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> Any:
        made = index.as_query_engine(llm=llm, response_mode=name, streaming="streamed" in way, **settings)
        return ask(made, "query", way)

    return run


def node_aware(name: str) -> Ask:
    def run(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> Any:
        synthesizer = KVPacketSynthesizer(llm, name, streaming="streamed" in way)
        return ask(index.as_query_engine(llm=llm, response_synthesizer=synthesizer), "query", way)

    return run


def chat(name: str) -> Ask:
    def run(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> Any:
        memory = ChatMemoryBuffer.from_defaults(llm=llm, chat_history=[ChatMessage(content="Hello.")])
        return ask(index.as_chat_engine(chat_mode=name, llm=llm, memory=memory), "chat", way)

    return run


def citation(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> Any:
    return ask(CitationQueryEngine.from_args(index, llm=llm, streaming="streamed" in way), "query", way)


def node_aware_citation(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> Any:
    synthesizer = KVPacketSynthesizer(llm, streaming="streamed" in way)
    return ask(CitationQueryEngine.from_args(index, llm=llm, response_synthesizer=synthesizer), "query", way)


class Decomposing(KVPacketLLM):
    """Says what an able model would when it is asked for sub-questions."""

    def predict(self, prompt: Any, **given: Any) -> str:
        return f'```json\n{{"items": [{{"sub_question": "{QUESTION}", "tool_name": "library"}}]}}\n```'

    async def apredict(self, prompt: Any, **given: Any) -> str:
        return self.predict(prompt)


def sub_questions(by_model: bool) -> Ask:
    def run(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> Any:
        tool = QueryEngineTool.from_defaults(index.as_query_engine(llm=llm), name="library", description="Leases.")
        asked = LLMQuestionGenerator.from_defaults(Decomposing(engine=llm.engine)) if by_model else OneQuestion()
        made = SubQuestionQueryEngine.from_defaults(
            [tool],
            question_gen=asked,  # else it asks for llama-index-question-gen-openai, whatever the model
            response_synthesizer=get_response_synthesizer(llm=llm, streaming="streamed" in way),
            verbose=False,
            use_async=False,
        )
        return ask(made, "query", way)

    return run


async def agent(llm: KVPacketLLM, index: VectorStoreIndex, way: str) -> str:
    tool = RetrieverTool.from_defaults(index.as_retriever(), name="library", description="Leases.")
    scripted = ScriptedAgent(engine=llm.engine, max_new_tokens=1, encode_retrieved=False)
    answer = str(await ReActAgent(tools=[tool], llm=scripted, streaming="streamed" in way).run(QUESTION))
    llm.usages.extend(scripted.usages)
    return answer


SCENES: dict[str, Ask] = {
    **{name: mode(name) for name in ("compact", "refine", "tree_summarize", *ONE_CHUNK_A_CALL)},
    **{f"{name}, node-aware": node_aware(name) for name in OWN},
    **{f"{name} chat": chat(name) for name in ("context", "condense_plus_context", "best", "condense_question")},
    "compact, multimodal": mode("compact", multimodal=True),
    "citation": citation,
    "citation, node-aware": node_aware_citation,
    "sub-questions": sub_questions(by_model=False),
    "sub-questions by the model": sub_questions(by_model=True),
    "ReAct agent": agent,
}
CASES = [
    (name, way)
    for name in SCENES
    for way in WAYS
    if not ("streamed" in way and name in ONE_CHUNK_A_CALL) and not (way in ("sync", "streamed") and "agent" in name)
]


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    return KVPacketLLM(engine=engine, max_new_tokens=1, encode_retrieved=False)


@pytest.fixture(autouse=True)
def _own_model(llm: KVPacketLLM) -> Any:
    """Some engines make parts of their own from the settings; these would ask for a model of a server."""
    Settings._llm, before = llm, Settings._llm
    yield
    Settings._llm, Settings._prompt_helper = before, None


def tell(title: str, kinds: list[ChunkKind], results: list[str]) -> None:
    with_kinds = ", ".join(f"{kind.name}: {result}" for kind, result in zip(kinds, results, strict=True))
    print(f"\n{title:45} {with_kinds}")


async def outcome(run: Ask, llm: KVPacketLLM, kind: ChunkKind, way: str) -> tuple[str, list[Any]]:
    """How many of the chunks came from packets, all calls together, and the misses."""
    store = KVPacketVectorStore(llm.engine)
    index = index_of(store, kind.nodes())
    llm.usages.clear()
    RETRIEVED.clear()
    await run(llm, index, way)
    store.clear()
    reused = sum(usage["chunks_reused"] for usage in llm.usages)
    return ("reused" if reused == 2 else f"{reused} of 2"), [miss for usage in llm.usages for miss in usage["misses"]]


@pytest.mark.parametrize(("scene", "way"), CASES)
async def test_every_chunk_is_reused_in_every_mode(llm: KVPacketLLM, scene: str, way: str):
    kinds = CHUNK_KINDS if way == "sync" or ("agent" in scene and way == "async") else HARD
    found = [await outcome(SCENES[scene], llm, kind, way) for kind in kinds]
    tell(f"{scene}, {way}", kinds, [result for result, _ in found])
    assert {result for result, _ in found} == {"reused"} and [misses for _, misses in found] == [[]] * len(kinds)


@pytest.mark.parametrize("way", WAYS)
async def test_llama_indexs_own_simple_summarize_tells_of_the_chunks_it_escapes(llm: KVPacketLLM, way: str):
    found = [await outcome(mode("simple_summarize"), llm, kind, way) for kind in CHUNK_KINDS]
    tell(f"simple_summarize, {way}", CHUNK_KINDS, [result for result, _ in found])
    escaped = {"multi-line", "CRLF and lone CR", "quotes, backslashes", "unicode", "byte order mark at an edge"}
    for kind, (result, misses) in zip(CHUNK_KINDS, found, strict=True):
        assert kind.name in escaped or result == "reused" or misses
        if kind.name in escaped:
            assert result == "0 of 2" and all("escaped" in miss["reason"] for miss in misses) and len(misses) == 2


async def test_with_the_prompt_helper_simple_summarize_shows_texts_as_they_are(llm: KVPacketLLM):
    Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)
    found = [await outcome(mode("simple_summarize"), llm, kind, "sync") for kind in CHUNK_KINDS]
    tell("simple_summarize, prompt helper", CHUNK_KINDS, [result for result, _ in found])
    assert found == [("reused", [])] * len(CHUNK_KINDS)
