"""LangChain over packets: chat model, text model, vector store, retriever and middleware that share one engine.

    store = KVPacketVectorStore.open("library")
    store.add_documents(documents)                      # packets are made here
    chat = ChatKVPacket.from_engine(store.engine)
    retriever = KVPacketRetriever(vectorstore=store, k=4)
    chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | chat
    chain.invoke("Who signed the lease?")               # retrieved text is not read again

These classes convert types; what they do is done by :mod:`kvpacket_rag`. ``KVPacketMiddleware`` needs the package
langchain besides langchain-core, and is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_kvpacket.chat_model import ChatKVPacket
from langchain_kvpacket.documents import format_docs
from langchain_kvpacket.embeddings import KVPacketEmbeddings
from langchain_kvpacket.llm import KVPacketLLM
from langchain_kvpacket.retriever import KVPacketRetriever
from langchain_kvpacket.transformer import KVPacketTransformer
from langchain_kvpacket.vector_store import KVPacketVectorStore

if TYPE_CHECKING:
    from langchain_kvpacket.middleware import KVPacketMiddleware

__all__ = [
    "ChatKVPacket",
    "KVPacketEmbeddings",
    "KVPacketLLM",
    "KVPacketMiddleware",
    "KVPacketRetriever",
    "KVPacketTransformer",
    "KVPacketVectorStore",
    "format_docs",
]


def __getattr__(name: str) -> Any:
    if name != "KVPacketMiddleware":
        raise AttributeError(f"module 'langchain_kvpacket' has no attribute {name!r}")
    from langchain_kvpacket.middleware import KVPacketMiddleware

    return KVPacketMiddleware
