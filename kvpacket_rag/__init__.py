"""Retrieval-augmented answers from precomputed key-value packets: no chunk is prefilled twice.

Importing this package does no work and loads no framework; each name is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpacket_rag.adapter import Adapter, import_paper_adapter
    from kvpacket_rag.answer import Answer, AnswerStream, Miss, Timings, Usage
    from kvpacket_rag.backbone import Backbone
    from kvpacket_rag.chat import Message, ToolCall
    from kvpacket_rag.chunk import Chunk, Hit
    from kvpacket_rag.decode import GenerationSettings
    from kvpacket_rag.documents import Document, read_documents
    from kvpacket_rag.embed import Embedder, SentenceTransformerEmbedder
    from kvpacket_rag.engine import KVPacketEngine
    from kvpacket_rag.errors import (
        AdapterError,
        ContextTooLongError,
        DatasetError,
        DeviceError,
        DocumentError,
        KVPacketError,
        MissingExtraError,
        ModelNotFoundError,
        PacketCorruptError,
        PacketError,
        PacketMismatchError,
        PacketMissError,
        PacketNotFoundError,
        PromptError,
        StoreError,
        StoreFormatError,
        StoreFullError,
        TrainingError,
        UnsupportedModelError,
    )
    from kvpacket_rag.index import PacketIndex
    from kvpacket_rag.packet import Packet, PacketSignature, packet_id
    from kvpacket_rag.pipeline import KVPacketRAG, RetrievedAnswer
    from kvpacket_rag.progress import IngestProgress, IngestReport
    from kvpacket_rag.reading import Reuse
    from kvpacket_rag.shipped import find_adapter
    from kvpacket_rag.split import Splitter
    from kvpacket_rag.store import DiskStore, KnownChunk, MemoryStore, PacketStore, RemoteStore, TieredStore

_HOMES = {
    "adapter": ("Adapter", "import_paper_adapter"),
    "answer": ("Answer", "AnswerStream", "Miss", "Timings", "Usage"),
    "backbone": ("Backbone",),
    "chat": ("Message", "ToolCall"),
    "chunk": ("Chunk", "Hit"),
    "decode": ("GenerationSettings",),
    "documents": ("Document", "read_documents"),
    "embed": ("Embedder", "SentenceTransformerEmbedder"),
    "engine": ("KVPacketEngine",),
    "errors": (
        "AdapterError",
        "ContextTooLongError",
        "DatasetError",
        "DeviceError",
        "DocumentError",
        "KVPacketError",
        "MissingExtraError",
        "ModelNotFoundError",
        "PacketCorruptError",
        "PacketError",
        "PacketMismatchError",
        "PacketMissError",
        "PacketNotFoundError",
        "PromptError",
        "StoreError",
        "StoreFormatError",
        "StoreFullError",
        "TrainingError",
        "UnsupportedModelError",
    ),
    "index": ("PacketIndex",),
    "progress": ("IngestProgress", "IngestReport"),
    "packet": ("Packet", "PacketSignature", "packet_id"),
    "pipeline": ("KVPacketRAG", "RetrievedAnswer"),
    "reading": ("Reuse",),
    "shipped": ("find_adapter",),
    "split": ("Splitter",),
    "store": ("DiskStore", "KnownChunk", "MemoryStore", "PacketStore", "RemoteStore", "TieredStore"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "Adapter",
    "AdapterError",
    "Answer",
    "AnswerStream",
    "Backbone",
    "Chunk",
    "ContextTooLongError",
    "DatasetError",
    "DeviceError",
    "DiskStore",
    "Document",
    "DocumentError",
    "Embedder",
    "GenerationSettings",
    "Hit",
    "IngestProgress",
    "IngestReport",
    "KVPacketEngine",
    "KVPacketError",
    "KVPacketRAG",
    "KnownChunk",
    "MemoryStore",
    "Message",
    "Miss",
    "MissingExtraError",
    "ModelNotFoundError",
    "Packet",
    "PacketCorruptError",
    "PacketError",
    "PacketIndex",
    "PacketMismatchError",
    "PacketMissError",
    "PacketNotFoundError",
    "PacketSignature",
    "PacketStore",
    "PromptError",
    "RemoteStore",
    "RetrievedAnswer",
    "Reuse",
    "SentenceTransformerEmbedder",
    "Splitter",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "TieredStore",
    "Timings",
    "ToolCall",
    "TrainingError",
    "UnsupportedModelError",
    "Usage",
    "find_adapter",
    "import_paper_adapter",
    "packet_id",
    "read_documents",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvpacket_rag' has no attribute {name!r}")
    return getattr(import_module(f"kvpacket_rag.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
