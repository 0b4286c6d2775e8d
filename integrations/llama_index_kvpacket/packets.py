"""Rows and packets of a vector store's nodes: what it does besides converting types and searching."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.schema import BaseNode, MetadataMode

from kvpacket_rag import (
    Chunk,
    KVPacketEngine,
    KVPacketError,
    PacketIndex,
    PacketMismatchError,
    StoreError,
)
from kvpacket_rag.origin import Origin
from kvpacket_rag.owners import UNOWNED, claim_names
from kvpacket_rag.ownership import Ownership
from llama_index_kvpacket.embedding import embedder_of
from llama_index_kvpacket.leftovers import Leftovers
from llama_index_kvpacket.loading import DEFAULT_MODEL, REDUCTION, for_transformers, load, resolve
from llama_index_kvpacket.nodes import packet_text
from llama_index_kvpacket.retrieved import RETRIEVED

Progress = Callable[[int, int], None]
TEXT_KEY = "packet_text_key"
EMBEDDER = "embedder"  # as the package's own pipeline names the setting
LOADING = "model_name adapter device device_map dtype model_kwargs tokenizer_kwargs min_match_tokens".split()
LOADING += [*REDUCTION, "remote", "cache_bytes"]
_BATCH_CHUNKS = 64


class NodePackets:
    """The rows of an index, each with a packet in the engine's store.

    Args:
        engine: makes and keeps the packets.
        index: of rows and vectors.
        folder: of the index; None for memory.
        text_key: metadata key of the text that packets are made of; None for what the index was built with, and
            ``""`` for the nodes' own text.
        progress: called with tokens done and tokens in all, as packets are made.
    """

    def __init__(
        self,
        engine: KVPacketEngine,
        index: PacketIndex,
        folder: Path | None,
        text_key: str | None,
        progress: Progress | None,
    ) -> None:
        self.engine = engine
        self.index = index
        self.folder = folder
        self.text_key = (index.get_setting(TEXT_KEY) or "") if text_key is None else text_key
        self.leftovers = Leftovers(engine)
        claim_names(index, engine.store)
        self.ownership = Ownership(index, engine.store, self.packet_of, folder)
        self._origin = Origin(index, folder)
        self._progress = progress

    def text_of(self, chunk: Chunk) -> str:
        """The text that a row's packet is made of."""
        return packet_text(chunk.text, chunk.metadata, self.text_key)

    def packet_of(self, chunk: Chunk) -> str:
        """Name of that packet."""
        return self.engine.encoder.identify(self.text_of(chunk))[0]

    def open(self, reencode: bool) -> None:
        """See that the engine can read the packets of a stored index, and note in it what it is built with.

        Args:
            reencode: make the packets anew that the engine cannot read.

        Raises:
            PacketMismatchError: they were made by another model, adapter or dtype.
            PacketNotFoundError: the engine's store knows none of them.
            StoreError: they were made of another text of the nodes.
        """
        if len(self.index) and self._is_stale(reencode):
            self._origin.begin_reencoding(self.engine)
            self._reencode()
        if self.index.get_setting("signature") != self.engine.signature.to_json():
            self._origin.begin_reencoding(self.engine)
            self.index.set_setting(TEXT_KEY, self.text_key)
            self.index.set_setting("signature", self.engine.signature.to_json())
        if reencode or self.index.get_setting(UNOWNED):
            self.ownership.adopt()
        self.ownership.recover()

    def put(self, chunks: Sequence[Chunk], vectors: Sequence[Sequence[float]], gone: Sequence[str] = ()) -> None:
        """Add rows, or replace those whose ids are known; all or none. A text that has a packet is not encoded.

        Args:
            chunks: to be added.
            vectors: one a chunk.
            gone: ids of rows that these take the place of, in one step; unknown ones are no error.

        Raises:
            DocumentError: a text is empty, or longer than the model's window.
            PacketMismatchError: another process has encoded the index anew for another model.
            StoreError: the vectors do not fit the index, or there is no room.
        """
        if self.index.get_setting("signature") != self.engine.signature.to_json():
            raise PacketMismatchError("the index was encoded again with another model, adapter or dtype; open it anew")
        if not chunks and not gone:
            return
        texts, names = [self.text_of(chunk) for chunk in chunks], [chunk.chunk_id for chunk in chunks]
        with self.ownership.changing([*names, *gone]) as owners:
            owners = owners[: len(names)]
            kept = set(texts)
            old = [self.text_of(chunk) for chunk in self.index.get([*names, *gone])]
            RETRIEVED.forget(text for text in old if text not in kept)
            self.leftovers.put_back(dict(zip(owners, texts, strict=True)))
            packets = self.engine.encode(texts, owners, self._progress)
            self.index.add(chunks, np.array(vectors, np.float32), packets, gone)

    def note_embedder(self, nodes: Iterable[BaseNode]) -> None:
        """Note in a new index which model its vectors are of: a KVPacketEmbedding's, or one that is not known."""
        node = next(iter(nodes), None)
        if node is None or node.embedding is None:
            return
        name = embedder_of(node.get_content(MetadataMode.EMBED), node.embedding) or ""
        if name != (self.index.get_setting(EMBEDDER) or ""):
            self.index.set_setting(EMBEDDER, name)

    def delete(self, names: Sequence[str]) -> None:
        """Delete rows, and the packets that no other row needs; unknown ids are no error."""
        if not names:
            return
        with self.ownership.changing(names):
            old = [self.text_of(chunk) for chunk in self.index.get(names)]
            RETRIEVED.forget(old)
            self.leftovers.collect(old)
            self.index.delete(names)

    def _is_stale(self, reencode: bool) -> bool:
        """Whether the packets of all rows have to be made anew, which is only said if that is allowed."""
        built_with = self.index.get_setting(TEXT_KEY) or ""
        if built_with != self.text_key and not reencode:
            raise StoreError(
                f"the packets of this index are made of {built_with or 'the text'!r} of its nodes, not of "
                f"{self.text_key or 'the text'!r}; leave packet_text_key out, or pass reencode=True"
            )
        return self._origin.check(self.engine, self._origin.embedder, reencode) or built_with != self.text_key

    def _reencode(self) -> None:
        """Give every row a packet of this engine; those that are there cost nothing."""
        rows = [chunk for chunk, _ in self.index.rows()]
        # All of them fit the model's window, or none is touched.
        wanted = (self.engine.encoder.identify(self.text_of(chunk)) for chunk in rows)
        left = {name: len(ids) for name, ids in wanted if name not in self.engine.store}
        done, total = 0, sum(left.values())
        for start in range(0, len(rows), _BATCH_CHUNKS):
            batch = rows[start : start + _BATCH_CHUNKS]
            names = [chunk.chunk_id for chunk in batch]
            with self.ownership.changing(names) as owners:
                told = self._told(done, total)
                packets = self.engine.encode([self.text_of(chunk) for chunk in batch], owners, told)
                self.index.set_packet_ids(dict(zip(names, packets, strict=True)))
                done += sum(left.pop(name, 0) for name in packets)

    def _told(self, before: int, total: int) -> Progress | None:
        """Progress of one batch as progress of all."""
        tell = self._progress
        return tell and (lambda done, _: tell(before + done, total))


def load_engine(index: PacketIndex, folder: Path | None, loading: Mapping[str, Any]) -> KVPacketEngine:
    """An engine over an index's packets, in its folder or at its URL: as it was built, where nothing else is asked for.

    Raises:
        KVPacketError: a loading argument that cannot have its effect.
    """
    options = resolve(loading, has_model=False, has_tokenizer=False)
    name = options.pop("model_name", None)
    if folder is None and {"remote", "cache_bytes"} & options.keys():
        raise KVPacketError("remote and cache_bytes are of an index in a folder; pass its path, too")
    if folder is None:
        return load(name or DEFAULT_MODEL, options)
    options["device"] = options.pop("device_map")
    options["model_kwargs"], options["tokenizer_kwargs"] = for_transformers(options)
    if options["dtype"] == "auto" and index.get_setting("dtype"):
        del options["dtype"]
    return Origin(index, folder).load_engine(name, options, keep_adapter=True)
