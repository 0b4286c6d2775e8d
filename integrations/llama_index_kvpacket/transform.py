"""KVPacketTransform: makes packets while documents are ingested into any vector store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent

from kvpacket_rag import KVPacketEngine, KVPacketError
from llama_index_kvpacket.beside import DEFAULT_OWNER, replace_packets
from llama_index_kvpacket.parameters import require_engine

PACKET_ID_KEY = "kvpacket_id"  # in a node's metadata; hidden from prompts and embeddings


class KVPacketTransform(TransformComponent):
    """The last step of an ingestion: every node's text becomes a packet, whatever vector store keeps the node.

    It only warms up. An ``IngestionCache`` that knows a text does not call its steps again, so packets may be
    missing, of a new packet store for one; a :class:`KVPacketPostprocessor` makes them when their nodes are
    retrieved. Model and adapter are part of the cache's key.

    A node that is returned is a copy, with the id of its packet in its metadata. Packets belong to documents: one that
    comes again in another version, by the hash that nodes tell of their source, keeps the packets it still has text
    for. Nodes of one version may come in several batches. :func:`drop_packets` drops those of a deleted one.

    Args:
        engine: makes the packets and keeps them in its store.
        packet_text_key: metadata key of the text that prompts will hold in place of the node's own, such as
            ``"window"`` for a ``SentenceWindowNodeParser``.
        owner: name of the collection; give each its own where several share an engine.

    Example:
        >>> steps = [SentenceSplitter(), embed_model, KVPacketTransform(engine)]           # doctest: +SKIP
        >>> IngestionPipeline(transformations=steps, vector_store=qdrant).run(documents=documents)  # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model_name: str = Field(description="Name of the model.")
    signature: str = Field(description="What a packet must share with its reader: model, adapter, dtype.")
    packet_text_key: str = Field(default="", description="Metadata key of the text of packets; empty for the node's.")
    owner: str = Field(default=DEFAULT_OWNER, description="Name of the collection, under which packets are kept.")

    _engine: KVPacketEngine = PrivateAttr()

    def __init__(self, engine: KVPacketEngine, packet_text_key: str = "", owner: str = DEFAULT_OWNER) -> None:
        require_engine(type(self).__name__, engine)
        origin: dict[str, Any] = {"model_name": engine.model_name, "signature": engine.signature.to_json()}
        super().__init__(**origin | {"packet_text_key": packet_text_key, "owner": owner})
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Make packets; a node without text, or with more than the model's window, has no packet id.

        Raises:
            StoreError: the packets cannot be stored.
        """
        found = replace_packets(self._engine, nodes, self.owner, self.packet_text_key)
        packets = {id(each.node): each.packet_id for each in found}
        return [_with_packet_id(node, packets.get(id(node), "")) for node in nodes]

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same in a worker thread."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVPacketTransform:
        return self.model_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        raise KVPacketError(
            f"a {type(self).__name__} holds a loaded model and cannot be pickled; run the pipeline without num_workers"
        )


def _with_packet_id(node: BaseNode, packet_id: str) -> BaseNode:
    """A copy that names its packet; without one, the node itself, or a copy without the name it has from before."""
    if not packet_id:
        metadata = {key: value for key, value in node.metadata.items() if key != PACKET_ID_KEY}
        return node if metadata == node.metadata else node.model_copy(update={"metadata": metadata})
    hidden = {
        name: [*dict.fromkeys([*getattr(node, name), PACKET_ID_KEY])]
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
    }
    return node.model_copy(update={"metadata": {**node.metadata, PACKET_ID_KEY: packet_id}, **hidden})
