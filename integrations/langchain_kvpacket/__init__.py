"""LangChain over packets: chat model, text model, vector store and embeddings that share one engine.

    store = KVPacketVectorStore.open("library")
    store.add_documents(documents)                      # packets are made here
    chat = ChatKVPacket.from_engine(store.engine)
    chain = {"context": store.as_retriever() | format_docs, "question": RunnablePassthrough()} | prompt | chat
    chain.invoke("Who signed the lease?")               # retrieved text is not read again

These classes convert types; what they do is done by :mod:`kvpacket_rag`.
"""

from __future__ import annotations

from langchain_kvpacket.chat_model import ChatKVPacket
from langchain_kvpacket.documents import format_docs
from langchain_kvpacket.embeddings import KVPacketEmbeddings
from langchain_kvpacket.llm import KVPacketLLM
from langchain_kvpacket.vector_store import KVPacketVectorStore

__all__ = ["ChatKVPacket", "KVPacketEmbeddings", "KVPacketLLM", "KVPacketVectorStore", "format_docs"]
