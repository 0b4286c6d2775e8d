"""LlamaIndex on packets: a language model, a vector store and an embedding model that share one engine.

Importing this package takes LlamaIndex for granted: ``pip install kvpacket-rag[llama-index]``.
"""

from __future__ import annotations

from llama_index_kvpacket.embedding import KVPacketEmbedding
from llama_index_kvpacket.llm import KVPacketLLM
from llama_index_kvpacket.vector_store import KVPacketVectorStore

__all__ = ["KVPacketEmbedding", "KVPacketLLM", "KVPacketVectorStore"]
