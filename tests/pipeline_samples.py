"""A tiny pipeline for tests: the random model, an embedder that counts words, and documents of a few sentences."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conftest import CHUNKS

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.compress.reduction import Reduction
from kvpacket_rag.documents import Document
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.index import PacketIndex
from kvpacket_rag.pipeline import KVPacketRAG
from kvpacket_rag.store import DiskStore, PacketStore

LEASE = "Ada Marlow signed the lease of the harbour office in March 2021 for a term of seven years."
NEW_LEASE = "Bo Lindqvist signed the lease of the harbour office in June 2024 for a term of three years."


class WordEmbedder:
    """Texts with words in common are near each other; no model needed."""

    def __init__(self, name: str = "words", dim: int = 64) -> None:
        self.name = name
        self.dim = dim
        self.embedded: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> Any:
        self.embedded += texts
        return np.stack([self.embed_query(text) for text in texts])

    def embed_query(self, text: str) -> Any:
        vector = np.full(self.dim, 1e-3, np.float32)
        for word in text.lower().split():
            vector[int(hashlib.sha256(word.strip(".,?").encode()).hexdigest(), 16) % self.dim] += 1
        return vector


def documents(texts: Sequence[str] = CHUNKS) -> list[Document]:
    """One document a text, of a single chunk each."""
    return [Document(f"d{number}", text, {"title": f"Title {number}"}) for number, text in enumerate(texts)]


def long_document(sections: int, name: str = "long", changed: int | None = None) -> Document:
    """A document of one chunk a section; the section ``changed`` says something else."""
    texts = [f"Section {n}: " + CHUNKS[n % 4].replace("the", f"the {n}th") for n in range(sections)]
    if changed is not None:
        texts[changed] = f"Section {changed}: this paragraph was written anew and says nothing of what stood here."
    return Document(name, "\n\n".join(texts), {"title": "Long"})


def pipeline(backbone: Backbone, folder: Path, **options: Any) -> KVPacketRAG:
    """Over a folder, without settings of its own."""
    engine = KVPacketEngine(backbone, DiskStore(folder), min_match_tokens=4)
    return KVPacketRAG(engine, PacketIndex.open(folder), options.pop("embedder", WordEmbedder()), **options)


def loader(backbone: Backbone, **backbones: Backbone) -> Callable[..., KVPacketEngine]:
    """In place of ``KVPacketEngine.load``: the tiny model, or another by name or dtype."""

    def load(
        model: str,
        *,
        store: PacketStore | Path | None = None,
        adapter: Any = None,
        sink: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        compress: Any = None,
        quantize: Any = None,
    ) -> KVPacketEngine:
        chosen = copy.copy(backbones.get(model) or backbones.get(dtype) or backbone)
        chosen.name = model
        if isinstance(adapter, str | Path):
            adapter = None if adapter == "auto" else Adapter.load(adapter)
        kept = DiskStore(store) if isinstance(store, Path) else store
        return KVPacketEngine(chosen, kept, adapter, sink or 0, 4, Reduction.of(compress, quantize))

    return load


def encoded_texts(rag: KVPacketRAG) -> list[int]:
    """A list that gains the number of tokens of every chunk the model encodes from now on."""
    seen: list[int] = []
    encode = rag.engine.encoder.encode

    def counting(*given: Any) -> Any:
        for packet in encode(*given):
            seen.append(packet.num_tokens)
            yield packet

    rag.engine.encoder.encode = counting  # type: ignore[method-assign]
    return seen


def packet_files(folder: Path) -> set[str]:
    """Names of the packet files in a folder."""
    return {path.stem for path in (folder / "packets").rglob("*.safetensors")}


def contents(rag: KVPacketRAG) -> list[tuple[str, str, str]]:
    """All rows, in order of their ids."""
    return sorted((chunk.chunk_id, chunk.text, packet_id) for chunk, packet_id in rag.index.rows())
