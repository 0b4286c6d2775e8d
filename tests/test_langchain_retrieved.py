"""What any LangChain retriever found is reused by the model it is shown to, and by no other run."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import CHUNKS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.tracers.context import _configure_hooks
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvpacket import ChatKVPacket, KVPacketLLM, KVPacketVectorStore, format_docs
from langchain_kvpacket.retrieved import _LISTENER, ADVICE, RETRIEVED
from langchain_samples import QUESTION, Reused, WordEmbeddings, documents

from kvpacket_rag import DiskStore, KVPacketEngine, PacketMissError
from kvpacket_rag.learner import ENCODED_NOW

PROMPT = ChatPromptTemplate.from_template("{context}\n\n{question}")
REFUNDS = "How are refunds paid?"


@pytest.fixture(autouse=True)
def _every_run_is_over_in_the_end() -> Iterator[None]:
    yield
    assert not (RETRIEVED._found or RETRIEVED._asked or RETRIEVED._outermost or RETRIEVED._held)


@pytest.fixture
def chat(engine: KVPacketEngine) -> ChatKVPacket:
    return ChatKVPacket(engine=engine, max_tokens=2)


@pytest.fixture
def retriever() -> BaseRetriever:
    """Of a vector store that knows nothing of packets."""
    found = InMemoryVectorStore.from_documents(documents(), WordEmbeddings()).as_retriever(search_kwargs={"k": 2})
    assert {document.id for document in found.invoke(QUESTION)} != {document.id for document in found.invoke(REFUNDS)}
    RETRIEVED.clear()
    return found


def chain(retriever: Any, model: Any, docs: Any = format_docs) -> Runnable[str, Any]:
    return {"context": retriever | docs, "question": RunnablePassthrough()} | PROMPT | model


def facts(message: Any) -> tuple[int, list[str]]:
    metadata = message.response_metadata
    return metadata["chunks_reused"], [miss["reason"] for miss in metadata["misses"]]


def test_a_chain_over_any_retriever_encodes_what_it_found_and_reuses_it_from_then_on(
    chat: ChatKVPacket, retriever: BaseRetriever
):
    first, second = (chain(retriever, chat).invoke(QUESTION) for _ in range(2))
    assert first.content == second.content and len(chat.engine.store) == 2
    assert facts(first) == (0, [ENCODED_NOW] * 2) and facts(second) == (2, [])
    counts = [message.usage_metadata for message in (first, second)]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"]
    cached = [count["input_token_details"]["cache_read"] for count in counts]
    assert cached[0] < 10 and cached[1] > 40  # of the template alone, and of the chunks


@pytest.mark.parametrize("make", [ChatKVPacket, KVPacketLLM])
async def test_every_way_to_run_a_chain_does(make: Any, chat: ChatKVPacket, retriever: BaseRetriever):
    made = chain(retriever, make(engine=chat.engine, max_tokens=2))
    runs = [Reused() for _ in range(7)]
    config: list[Any] = [{"callbacks": [run]} for run in runs]
    await made.ainvoke(QUESTION, config[0])
    made.invoke(QUESTION, config[1])
    _ = list(made.stream(QUESTION, config[2]))
    _ = [piece async for piece in made.astream(QUESTION, config[3])]
    _ = [event async for event in made.astream_events(QUESTION, config[4], version="v2")]
    made.batch([QUESTION, QUESTION], config[5])
    await made.abatch([QUESTION, REFUNDS], config[6])
    reused = [run.chunks for run in runs]
    assert reused[:6] == [[0], [2], [2], [2], [2], [2, 2]] and sorted(reused[6]) in ([0, 2], [1, 2])


def by_itself(retriever: BaseRetriever) -> list[Document]:
    return retriever.invoke(QUESTION)


def in_a_thread(retriever: BaseRetriever) -> list[Document]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(retriever.invoke, QUESTION).result()


def in_a_batch(retriever: BaseRetriever) -> list[Document]:
    return retriever.batch([QUESTION, REFUNDS])[0]


def in_a_task(retriever: BaseRetriever) -> list[Document]:
    async def gathered() -> Any:
        return await asyncio.gather(retriever.ainvoke(QUESTION), retriever.ainvoke(REFUNDS))

    return asyncio.run(gathered())[0]


def in_a_chain_of_its_own(retriever: BaseRetriever) -> list[Document]:
    return (retriever | RunnablePassthrough()).invoke(QUESTION)


@pytest.mark.parametrize("retrieve", [by_itself, in_a_thread, in_a_batch, in_a_task, in_a_chain_of_its_own])
def test_a_retriever_may_be_called_apart_from_the_model(chat: ChatKVPacket, retriever: BaseRetriever, retrieve: Any):
    text = format_docs(retrieve(retriever))
    assert [facts(chat.invoke(text))[0] for _ in range(2)] == [0, 2] and len(chat.engine.store) == 2


def test_a_retriever_inside_a_function_or_a_tool_counts_as_of_its_run(chat: ChatKVPacket, retriever: BaseRetriever):
    tool = create_retriever_tool(retriever, "search", "Look it up.")
    searches = (lambda q: format_docs(retriever.invoke(q)), lambda q: tool.invoke({"query": q}))
    for search, question in zip(searches, (QUESTION, REFUNDS), strict=True):
        run: Any = RunnableLambda(lambda q, search=search: chat.invoke(search(q)))
        (first, reasons), second = [facts(run.invoke(question)) for _ in range(2)]
        assert set(reasons) == {ENCODED_NOW} and first + len(reasons) == 2 and second == (2, [])


def test_only_what_was_retrieved_and_stands_in_the_prompt_is_encoded(chat: ChatKVPacket, retriever: BaseRetriever):
    found = retriever.invoke(QUESTION)
    other = next(text for text in CHUNKS if text not in format_docs(found))
    chat.invoke(f"{found[0].page_content}\n\n{other}")
    assert [known.text for known in chat.engine.store.known(chat.engine.signature)] == [found[0].page_content]


def test_runs_at_the_same_time_know_nothing_of_each_others_documents(chat: ChatKVPacket):
    both = threading.Barrier(2)

    def as_they_are(found: list[Document]) -> str:
        both.wait(20)  # until both have retrieved
        return f"{found}\n{CHUNKS[1]}\n{CHUNKS[2]}"  # so a part of each document stands in both prompts

    lines = [f"{text}\n{text}\nline {n}" for n, text in enumerate(CHUNKS)]
    store = InMemoryVectorStore.from_texts(lines, WordEmbeddings())
    answers = chain(store.as_retriever(search_kwargs={"k": 1}), chat, as_they_are).batch([QUESTION, REFUNDS])
    told = [[miss["packet_id"] for miss in answer.response_metadata["misses"]] for answer in answers]
    assert told == [[chat.engine.encoder.identify(lines[n])[0]] for n in (1, 2)] and len(chat.engine.store) == 0


@pytest.mark.parametrize("fields", [{"match": "off"}, {"policy": "prefill"}, {"encode_retrieved": False}])
def test_nothing_is_encoded_where_that_is_not_wanted(
    chat: ChatKVPacket, retriever: BaseRetriever, fields: dict[str, Any]
):
    message = chain(retriever, ChatKVPacket(engine=chat.engine, max_tokens=1, **fields)).invoke(QUESTION)
    assert facts(message) == (0, [ADVICE.not_encoded] * 2 if "encode_retrieved" in fields else [])
    assert len(chat.engine.store) == 0


def test_a_folder_keeps_nothing_that_would_outlive_its_document(
    engine: KVPacketEngine, retriever: BaseRetriever, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = KVPacketEngine(engine.backbone, DiskStore(tmp_path), min_match_tokens=4)
    made = chain(retriever, ChatKVPacket(engine=folder, max_tokens=1))
    assert [facts(made.invoke(QUESTION)) for _ in range(2)] == [(0, [ADVICE.not_encoded] * 2)] * 2
    assert not list(folder.store.known(folder.signature))
    assert caplog.text.count("a KVPacketRetriever around the vector store") == 1
    folder.close()


def test_a_miss_that_is_to_be_an_error_is_one_here_too(chat: ChatKVPacket, retriever: BaseRetriever):
    strict = ChatKVPacket(engine=chat.engine, max_tokens=1, on_miss="error")
    with pytest.raises(PacketMissError, match="has no packet; a KVPacketRetriever"):
        chain(retriever, strict).invoke(QUESTION)
    chain(retriever, chat).invoke(QUESTION)
    assert facts(chain(retriever, strict).invoke(QUESTION)) == (2, [])


def test_hints_alone_are_what_was_retrieved(chat: ChatKVPacket, retriever: BaseRetriever):
    chat.engine.encode(CHUNKS)
    hinted = ChatKVPacket(engine=chat.engine, max_tokens=1, match="hints")
    everything = PROMPT.format(context="\n\n".join(CHUNKS), question=QUESTION)
    assert facts((retriever | RunnableLambda(lambda _: everything) | hinted).invoke(QUESTION)) == (2, [])


@pytest.mark.parametrize(
    ("docs", "layout", "reason"),
    [
        (RunnablePassthrough(), "{context}", "line breaks and quotes escaped, as Python writes a list of documents"),
        (format_docs, "{{context}}", "escaped for HTML, as mustache writes {{it}}"),
        (lambda found: found[0].page_content[:90], "{context}", "the prompt holds a part of it alone"),
    ],
)
def test_a_document_that_the_prompt_holds_in_another_form_is_a_miss_with_the_way_out(
    chat: ChatKVPacket, caplog: pytest.LogCaptureFixture, docs: Any, layout: str, reason: str
):
    long = "\n".join([*CHUNKS[:2], "He said \"never\", she said 'always' & <b>left</b> at nine in the evening."])
    store = InMemoryVectorStore.from_texts([long], WordEmbeddings())
    template = "mustache" if layout.startswith("{{") else "f-string"
    prompt = ChatPromptTemplate.from_messages([("human", layout)], template_format=template)
    made = {"context": store.as_retriever() | docs} | prompt | chat
    told = [facts(made.invoke(QUESTION)) for _ in range(2)]
    assert told[0] == told[1] == (0, told[0][1]) and reason in told[0][1][0] and caplog.text.count(reason) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\n\n".join(CHUNKS), "the engine knows no chunks, and the prompt holds no document that a retriever found"),
        ("Hi", ""),
    ],
)
def test_a_prompt_of_which_nothing_could_be_reused_is_told_of_once(
    chat: ChatKVPacket, caplog: pytest.LogCaptureFixture, text: str, told: str
):
    for _ in range(2):
        chat.invoke(text)
    assert [told in record.getMessage() for record in caplog.records] == ([True] if told else [])


def test_documents_that_were_rewritten_on_the_way_are_told_of_once(
    chat: ChatKVPacket, retriever: BaseRetriever, caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        chain(retriever, chat, lambda found: format_docs(found).upper()).invoke(QUESTION)
    assert [record.getMessage()[:76] for record in caplog.records] == [
        "nothing was reused: the prompt holds none of the 2 documents retrieved for i"
    ]


def test_a_later_prompt_of_a_run_that_holds_none_of_its_documents_is_no_fault(
    chat: ChatKVPacket, retriever: BaseRetriever, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As in map_reduce: a summary may quote a document, in part."""

    def map_reduce(question: str) -> Any:
        found = retriever.invoke(question)
        for document in found:
            chat.invoke(f"{document.page_content}\n\n{question}")
        return chat.invoke(f"{found[0].page_content[:90]}\n\n{found[1].page_content[:90]}\n\n{question}")

    last: Any = RunnableLambda(map_reduce).invoke(QUESTION)
    assert facts(last)[0] == 0 and not caplog.records
    chain(retriever, chat, lambda found: format_docs(found).upper()).invoke(QUESTION)
    assert "the prompt holds none of the 2 documents" in caplog.text


async def test_runs_that_fail_or_are_left_are_forgotten(
    chat: ChatKVPacket, retriever: BaseRetriever, monkeypatch: pytest.MonkeyPatch
):
    stream = chain(retriever, chat).stream(QUESTION)
    assert next(stream) is not None
    stream.close()  # type: ignore[attr-defined]
    monkeypatch.setattr(chat.engine.backbone, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chain(retriever, chat).invoke(QUESTION)
    with pytest.raises(ZeroDivisionError):
        await chain(retriever, chat).ainvoke(QUESTION)
    with pytest.raises(KeyError):
        chain(retriever | RunnableLambda(lambda found: {}["none"]), chat).invoke(QUESTION)


def test_listening_begins_once_and_keeps_no_engine_alive(chat: ChatKVPacket, retriever: BaseRetriever):
    assert [hook[0] for hook in _configure_hooks].count(_LISTENER) == 1  # type: ignore[comparison-overlap]
    other = KVPacketEngine(chat.engine.backbone, min_match_tokens=4)
    chain(retriever, ChatKVPacket(engine=other, max_tokens=1)).invoke(QUESTION)
    watch = weakref.ref(other)
    del other
    gc.collect()
    assert watch() is None


def test_a_document_that_was_deleted_gets_no_packet_again(engine: KVPacketEngine):
    store = KVPacketVectorStore.from_documents(documents(), WordEmbeddings(), engine=engine)
    chat = ChatKVPacket(engine=engine, max_tokens=1)
    text = format_docs(store.as_retriever().invoke(QUESTION))
    store.delete(["d0"])
    store.add_texts(["Nothing is known of the lease of the harbour office any more."], ids=["d1"])
    assert facts(chat.invoke(f"{text} So?")) == (2, []) and len(engine.store) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of the driver")])
def test_an_error_while_chunks_are_encoded_is_the_one_that_is_raised(
    error: BaseException, chat: ChatKVPacket, retriever: BaseRetriever, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("kvpacket_rag.packet_writer.PacketWriter.write_missing", fail)
        with pytest.raises(type(error)):
            chain(retriever, chat).invoke(QUESTION)
    assert facts(chain(retriever, chat).invoke(QUESTION))[1] == [ENCODED_NOW] * 2
