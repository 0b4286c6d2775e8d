"""Answers that are to fill a class: filled where the model writes JSON, and told where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CHUNKS
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index_kvpacket import KVPacketLLM
from pydantic import BaseModel

from kvpacket_rag import KVPacketEngine, KVPacketError


class Lease(BaseModel):
    years: int


@pytest.fixture
def llm(engine: KVPacketEngine) -> KVPacketLLM:
    return KVPacketLLM(engine=engine, max_new_tokens=4)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exchanges what the model writes."""

    def exchange(text: str) -> None:
        for name in ("chat_response", "completion_response"):
            original = getattr(__import__("llama_index_kvpacket.llm").llm, name)
            monkeypatch.setattr(f"llama_index_kvpacket.llm.{name}", lambda _, *more, of=original: of(text, *more))

    return exchange


async def test_an_answer_that_is_no_json_is_told(llm: KVPacketLLM):
    prompt = PromptTemplate("How long is the lease? {text}")
    error = r"the model's answer is no JSON of Lease \(.+ask for a text"
    with pytest.raises(KVPacketError, match=error):
        llm.structured_predict(Lease, prompt, text=CHUNKS[0])
    with pytest.raises(KVPacketError, match=error):
        await llm.astructured_predict(Lease, prompt, text=CHUNKS[0])
    with pytest.raises(KVPacketError, match=error):
        llm.as_structured_llm(Lease).chat([ChatMessage(content="How long?")])


async def test_json_fills_the_class(llm: KVPacketLLM, answers: Any):
    answers('Here it is: {"years": 5}')
    prompt = PromptTemplate("How long is the lease? {text}")
    assert llm.structured_predict(Lease, prompt, text=CHUNKS[0]) == Lease(years=5)
    assert await llm.astructured_predict(Lease, prompt, text=CHUNKS[0]) == Lease(years=5)
    assert llm.as_structured_llm(Lease).complete("How long?").raw == Lease(years=5)


async def test_a_query_engine_does_not_answer_with_nothing_instead(llm: KVPacketLLM, answers: Any):
    index = VectorStoreIndex.from_documents([Document(text=CHUNKS[0])], embed_model=MockEmbedding(4))
    query_engine = index.as_query_engine(llm=llm, output_cls=Lease)
    with pytest.raises(KVPacketError, match="no JSON of Lease"):
        query_engine.query("How long?")
    with pytest.raises(KVPacketError, match="no JSON of Lease"):
        await query_engine.aquery("How long?")
    answers('{"years": 5}')
    assert query_engine.query("How long?").response == Lease(years=5)
