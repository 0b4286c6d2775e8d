"""KVPacketPostprocessor: sees that every retrieved node has a packet, whatever vector store it comes from."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from kvpacket_rag import DeviceError, KVPacketEngine, KVPacketError, StoreError
from llama_index_kvpacket.beside import DEFAULT_OWNER, encodable
from llama_index_kvpacket.parameters import require_engine

logger = logging.getLogger(__name__)


class KVPacketPostprocessor(BaseNodePostprocessor):
    """The last post-processor of a query or chat engine: nodes pass unchanged, and have packets from then on.

    A packet that is missing is made: nothing that was ingested without a :class:`KVPacketTransform`, or skipped by an
    ingestion cache, is read more than once. ``KVPacketLLM`` does the same for whatever a retriever finds; packets made
    here belong to their documents, so that :func:`drop_packets` finds them.

    Args:
        engine: the one of the ``KVPacketLLM``.
        packet_text_key: as of the transform; not needed behind a ``MetadataReplacementPostProcessor``.
        owner: as of the transform.

    Example:
        >>> index.as_query_engine(llm=llm, node_postprocessors=[KVPacketPostprocessor(llm.engine)])  # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    packet_text_key: str = Field(default="", description="Metadata key of the text of packets; empty for the node's.")
    owner: str = Field(default=DEFAULT_OWNER, description="Name of the collection, under which packets are kept.")

    _engine: KVPacketEngine = PrivateAttr()
    _encoded: int = PrivateAttr(default=0)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self, engine: KVPacketEngine, packet_text_key: str = "", owner: str = DEFAULT_OWNER, **fields: Any
    ) -> None:
        require_engine(type(self).__name__, engine)
        fields |= {"packet_text_key": packet_text_key, "owner": owner}
        super().__init__(**fields)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketPostprocessor"

    @property
    def packets_encoded(self) -> int:
        """How many retrieved nodes had no packet until now; 0 when ingestion made them all."""
        return self._encoded

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self._ensure(nodes)
        return nodes

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        await asyncio.to_thread(self._ensure, nodes)
        return nodes

    def _ensure(self, nodes: Sequence[NodeWithScore]) -> None:
        """Make the packets that are missing."""
        found = encodable(self._engine, [scored.node for scored in nodes], self.owner, self.packet_text_key)
        missing = {each.packet_id: each for each in found if each.packet_id not in self._engine.store}
        if not missing:
            return
        texts, owners = [each.text for each in missing.values()], [each.owner for each in missing.values()]
        try:
            self._engine.encode(texts, owners)
        except (DeviceError, StoreError) as error:
            left = sum(name not in self._engine.store for name in missing)
            logger.warning("%d retrieved nodes have no packet and are read in full: %s", left, str(error))
        made = sum(name in self._engine.store for name in missing)
        with self._lock:
            self._encoded += made
        logger.info("%d of %d retrieved nodes had no packet and were encoded", made, len(found))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVPacketPostprocessor:
        return self.model_copy()

    def __reduce__(self) -> tuple[Any, ...]:
        raise KVPacketError(f"a {type(self).__name__} holds a loaded model and cannot be pickled")
