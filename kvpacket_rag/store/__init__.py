"""Where packets rest: the protocol, a store on disk, in memory or in an object store, and faster tiers above."""

from __future__ import annotations

from kvpacket_rag.store.check import StoreCheck, StoreState
from kvpacket_rag.store.disk import DiskStore
from kvpacket_rag.store.memory import MemoryStore
from kvpacket_rag.store.metrics import StoreCounts, StoreMetrics
from kvpacket_rag.store.opening import open_store, reopen_store
from kvpacket_rag.store.protocol import KnownChunk, PacketStore
from kvpacket_rag.store.remote import RemoteStore
from kvpacket_rag.store.remote_bucket import is_url
from kvpacket_rag.store.tiered import TieredStore

__all__ = [
    "DiskStore",
    "KnownChunk",
    "MemoryStore",
    "PacketStore",
    "RemoteStore",
    "StoreCheck",
    "StoreCounts",
    "StoreMetrics",
    "StoreState",
    "TieredStore",
    "is_url",
    "open_store",
    "reopen_store",
]
