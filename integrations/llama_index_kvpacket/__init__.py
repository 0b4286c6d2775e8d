"""LlamaIndex on packets: a language model, a synthesizer and a vector store that share one engine.

With any other vector store a transform and a post-processor keep the packets beside it. Importing this package takes
LlamaIndex for granted: ``pip install kvpacket-rag[llama-index]``.
"""

from __future__ import annotations

from llama_index_kvpacket.beside import drop_packets
from llama_index_kvpacket.documents import adelete_document, delete_document
from llama_index_kvpacket.embedding import KVPacketEmbedding
from llama_index_kvpacket.llm import KVPacketLLM
from llama_index_kvpacket.postprocessor import KVPacketPostprocessor
from llama_index_kvpacket.prompt_helper import BoundaryPromptHelper
from llama_index_kvpacket.synthesizer import KVPacketSynthesizer
from llama_index_kvpacket.transform import KVPacketTransform
from llama_index_kvpacket.vector_store import KVPacketVectorStore

__all__ = [
    "BoundaryPromptHelper",
    "KVPacketEmbedding",
    "KVPacketLLM",
    "KVPacketPostprocessor",
    "KVPacketSynthesizer",
    "KVPacketTransform",
    "KVPacketVectorStore",
    "adelete_document",
    "delete_document",
    "drop_packets",
]
