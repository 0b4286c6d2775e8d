"""Gets the packets of a prompt: from the store, or encoded again where that has none it can give."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from kvpacket_rag.answer import Miss
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import PacketError, StoreError
from kvpacket_rag.packet import Packet
from kvpacket_rag.parts import Part, absorb
from kvpacket_rag.store import PacketStore, TieredStore

logger = logging.getLogger(__name__)

_ENDS_WITH_CHUNK = "the prompt ends with this chunk, so it had to be read for the next token"


@dataclass(slots=True)
class Loaded:
    """A prompt with its packets at hand.

    Attributes:
        parts: those that packets stand for hold them.
        seconds: it took.
        misses: packets that could not be used.
        reused: ids of those that can.
        encoded_tokens: of chunks whose packets had to be made.
    """

    parts: list[Part] = field(default_factory=list)
    seconds: float = 0.0
    misses: list[Miss] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    encoded_tokens: int = 0

    @property
    def num_slots(self) -> int:
        """Slots the prompt takes in a context."""
        return sum(part.packet.num_slots if part.packet else part.num_tokens for part in self.parts)


class PacketLoader:
    """Gets packets for one engine.

    Args:
        encoder: makes those that are missing.
        store: keeps them.
    """

    def __init__(self, encoder: PacketEncoder, store: PacketStore) -> None:
        self._encoder = encoder
        self._store = store

    def holding(self, parts: Iterable[Part]) -> AbstractContextManager[None]:
        """Within it, none of the packets that the parts name is evicted."""
        return self._store.hold([part.packet_id for part in parts if part.packet_id])

    def load(self, parts: Sequence[Part], sparing: bool = False) -> Loaded:
        """Put packets into the parts that name one; a chunk at the very end becomes text.

        Args:
            parts: of a prompt; not changed.
            sparing: make no copies of packets in faster memory.
        """
        started = time.perf_counter()
        loaded = Loaded()
        for number, part in enumerate(parts):
            if part.packet_id is None:
                loaded.parts.append(part)
            elif number == len(parts) - 1:
                loaded.misses.append(Miss(part.packet_id, _ENDS_WITH_CHUNK))
                loaded.parts.append(replace(part, packet_id=None))
            else:
                packet = self._fetch(part.packet_id, part, loaded, sparing)
                loaded.parts.append(replace(part, packet=packet))
        if self._encoder.adapter.absorbs:
            loaded.parts = absorb(loaded.parts)
        loaded.seconds = time.perf_counter() - started
        return loaded

    def drop_copies(self) -> None:
        """Let go of copies in faster memory."""
        if isinstance(self._store, TieredStore):
            self._store.drop_copies()

    def _fetch(self, name: str, part: Part, loaded: Loaded, sparing: bool) -> Packet:
        store = self._store.below if sparing and isinstance(self._store, TieredStore) else self._store
        try:
            packet = store.get(name, self._encoder.signature)
            loaded.reused.append(name)
            return packet
        except (PacketError, StoreError) as error:
            logger.warning("packet %s is encoded again: %s", name, str(error))
            loaded.misses.append(Miss(name, str(error)))
        (packet,) = self._encoder.encode([(name, ids_of(self._encoder.backbone, part))])
        loaded.encoded_tokens += packet.num_tokens
        try:
            self._store.put(packet, part.text, only_known=True)
        except StoreError as error:
            logger.warning("packet %s serves this request only: %s", name, str(error))
        return packet


def ids_of(backbone: Backbone, part: Part) -> list[int]:
    """Tokens of a part, which keeps them; a chunk is tokenised as it was for its packet."""
    if part.ids is None:
        part.ids = backbone.token_ids(part.text)
    return part.ids
