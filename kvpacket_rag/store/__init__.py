"""Where packets rest: the protocol, a store on disk and a store in memory."""

from __future__ import annotations

from kvpacket_rag.store.disk import DiskStore
from kvpacket_rag.store.memory import MemoryStore
from kvpacket_rag.store.protocol import KnownChunk, PacketStore

__all__ = ["DiskStore", "KnownChunk", "MemoryStore", "PacketStore"]
