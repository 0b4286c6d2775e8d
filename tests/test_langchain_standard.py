"""LangChain's own suites for integrations, unmodified, on a tiny model. They need langchain-tests."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("langchain_tests")

from conftest import CHUNKS
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.vectorstores import VectorStore
from langchain_kvpacket import ChatKVPacket, KVPacketEmbeddings, KVPacketRetriever, KVPacketVectorStore
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests

from kvpacket_rag import KVPacketEngine


class _OverTinyModel:
    """What both suites of chat models ask about ours."""

    engine: KVPacketEngine

    @pytest.fixture(autouse=True)
    def _make_engine(self, engine: KVPacketEngine) -> None:
        type(self).engine = engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVPacket

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_tokens": 16}

    @property
    def has_tool_calling(self) -> bool:
        return False  # the tiny model writes no calls, and no model can be forced to; see test_langchain_tools.py

    @property
    def supports_model_override(self) -> bool:
        return False  # packets are of one model


class TestChatModelUnit(_OverTinyModel, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}


class TestChatModelIntegration(_OverTinyModel, ChatModelIntegrationTests):
    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self.engine.encode(CHUNKS)
        chat = ChatKVPacket(**self.chat_model_params)
        if not stream:
            return chat.invoke(CHUNKS[0])
        chunks = list(chat.stream(CHUNKS[0]))
        return sum(chunks[1:], start=chunks[0]) if isinstance(chunks[0], AIMessageChunk) else chunks[0]


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, engine: KVPacketEngine) -> VectorStore:
        return KVPacketVectorStore(self.get_embeddings(), engine)


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _make_store(self, engine: KVPacketEngine) -> None:
        embeddings = VectorStoreIntegrationTests.get_embeddings()
        type(self).store = KVPacketVectorStore.from_texts(CHUNKS, embeddings, engine=engine)

    store: KVPacketVectorStore

    @property
    def retriever_constructor(self) -> type[KVPacketRetriever]:
        return KVPacketRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"vectorstore": self.store}

    @property
    def retriever_query_example(self) -> str:
        return "Who signed the lease?"


@pytest.mark.model
class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return KVPacketEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {}
