"""From a prompt in parts to a filled context and the logits of the first token.

Packets are loaded, realigned and laid end to end; only text is read by the model. A packet that
cannot be used is encoded again from its text and counted as a miss, so a doubt never becomes a
wrong answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from kvpacket_rag.answer import Miss
from kvpacket_rag.assemble import Context, Filled, Key, Span
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import ContextTooLongError, PacketError, PromptError, StoreError
from kvpacket_rag.packet import Packet, packet_id
from kvpacket_rag.parts import Part, absorb
from kvpacket_rag.runner import BoundContext
from kvpacket_rag.store import PacketStore

logger = logging.getLogger(__name__)

_MAX_PREAMBLES = 16
_MAX_PREAMBLE_BYTES = 128 * 2**20
_ENDS_WITH_CHUNK = "the prompt ends with this chunk, so it had to be read for the next token"


@dataclass(slots=True)
class Prefilled:
    """A context ready to decode from.

    Attributes:
        context: give it back to the pool when done.
        bound: the same, as the model takes it.
        logits: (1, vocabulary) of the first token.
        reused: ids of the packets it was filled from, in order.
    """

    context: Context
    bound: BoundContext
    logits: Tensor
    packet_tokens: int
    preamble_tokens: int
    prefilled_tokens: int
    reused: tuple[str, ...]
    misses: tuple[Miss, ...]
    load_seconds: float
    assemble_seconds: float


@dataclass(slots=True)
class _Loading:
    """What loading has counted so far."""

    misses: list[Miss] = field(default_factory=list)
    packet_tokens: int = 0
    preamble_tokens: int = 0
    encoded_tokens: int = 0
    reused: list[str] = field(default_factory=list)


class Prefiller:
    """Fills contexts for one engine.

    Args:
        backbone: the model.
        encoder: makes the packets that are missing.
        store: keeps them.
    """

    def __init__(self, backbone: Backbone, encoder: PacketEncoder, store: PacketStore) -> None:
        self._backbone = backbone
        self._encoder = encoder
        self._store = store
        self._preambles: OrderedDict[tuple[int, ...], Packet] = OrderedDict()
        self._lock = threading.Lock()

    def check_length(self, parts: Sequence[Part], max_new_tokens: int) -> None:
        """Refuse what cannot fit, before any work.

        Raises:
            PromptError: there is nothing to read.
            ContextTooLongError: prompt and answer take more positions than the model has.
        """
        soft = self._encoder.adapter.stored_tokens * sum(part.packet_id is not None for part in parts)
        prompt = sum(part.num_tokens for part in parts) + soft
        window = self._backbone.context_window
        if not parts:
            raise PromptError("the prompt is empty; expected at least one token of text")
        if prompt + max_new_tokens > window:
            raise ContextTooLongError(
                f"the prompt takes {prompt} positions ({soft} of them soft tokens) and the answer may take "
                f"{max_new_tokens}, together more than the {window} of {self._backbone.name}; "
                "retrieve fewer or shorter chunks, or lower max_new_tokens"
            )

    def ids(self, part: Part) -> list[int]:
        """Tokens of a part, which keeps them; a chunk is tokenised as it was for its packet."""
        if part.ids is None:
            part.ids = self._backbone.token_ids(part.text)
        return part.ids

    def all_ids(self, parts: Sequence[Part]) -> list[int]:
        """Tokens of the whole prompt, chunks included."""
        return [token for part in parts for token in self.ids(part)]

    def run(self, parts: Sequence[Part], max_new_tokens: int) -> Prefilled:
        """Load, assemble, prefill.

        Args:
            parts: of the prompt; those with a packet id are taken from packets.
            max_new_tokens: room to leave for the answer.
        """
        started = time.perf_counter()
        count = _Loading()
        with self._store.hold([part.packet_id for part in parts if part.packet_id]):
            ready = self._load(parts, count)
            if self._encoder.adapter.absorbs:
                ready = absorb(ready)
            loaded = time.perf_counter()
            preamble = self._new_preamble(ready)
            context = self._take(ready, max_new_tokens)
            try:
                _count(ready, len(context.filled), count)
                texts, filled = self._lay_out(ready, context)
                assembled = time.perf_counter()
                bound = self._backbone.bind(context)
                logits = self._backbone.prefill(bound, texts)
                context.filled = filled
                if preamble is not None:
                    self._keep_preamble(preamble, context)
            except BaseException:
                self._backbone.pool.give_back(context)
                raise
        read = sum(len(ids) for _, ids in texts) + count.encoded_tokens
        tokens = count.packet_tokens - count.encoded_tokens, count.preamble_tokens, read
        seconds = loaded - started, assembled - loaded
        return Prefilled(context, bound, logits, *tokens, tuple(count.reused), tuple(count.misses), *seconds)

    def _take(self, parts: list[Part], max_new_tokens: int) -> Context:
        """A context with room for the parts, if possible one that an earlier prompt filled with the first of them."""
        slots = sum(part.packet.num_slots if part.packet else part.num_tokens for part in parts) + max_new_tokens
        pool = self._backbone.pool
        return pool.take_filled([self._key(part) for part in parts[:-1]], slots) or pool.take(slots)

    def _key(self, part: Part) -> Key:
        """What the slots of a part hold, given those before it."""
        return part.packet_id or tuple(self.ids(part))

    def _lay_out(self, parts: list[Part], context: Context) -> tuple[list[tuple[Span, list[int]]], tuple[Filled, ...]]:
        """Write packets into the context and reserve room for text, behind what it is filled with already.

        Each packet is let go of once it is written. The context counts as filled with nothing until its texts are
        read; should that fail, no later prompt goes on with it.

        Returns:
            The places of the texts and their tokens, and what the context is filled with once they are read.
        """
        texts: list[tuple[Span, list[int]]] = []
        filled, context.filled = list(context.filled), ()
        for part in parts[len(filled) :]:
            if part.packet:
                context.place(part.packet)
                part.packet = None  # unmaps the file, so that its pages do not stand beside their copy
            else:
                texts.append((context.reserve(part.num_tokens), self.ids(part)))
            filled.append(Filled(self._key(part), context.num_slots, context.num_positions))
        return texts, tuple(filled)

    def _load(self, parts: Sequence[Part], count: _Loading) -> list[Part]:
        """Put packets into the parts that name one; a chunk at the very end becomes text."""
        ready = []
        for number, part in enumerate(parts):
            if part.packet_id is None:
                ready.append(part)
            elif number == len(parts) - 1:
                count.misses.append(Miss(part.packet_id, _ENDS_WITH_CHUNK))
                ready.append(replace(part, packet_id=None))
            else:
                ready.append(replace(part, packet=self._fetch(part.packet_id, part, count)))
        preamble = self._new_preamble(ready)
        if preamble is not None:
            with self._lock:
                ready[0] = replace(ready[0], packet=self._preambles.get(tuple(preamble)))
        return ready

    def _fetch(self, name: str, part: Part, count: _Loading) -> Packet:
        try:
            packet = self._store.get(name, self._encoder.signature)
            count.reused.append(name)
            return packet
        except (PacketError, StoreError) as error:
            logger.warning("packet %s is encoded again: %s", name, error)
            count.misses.append(Miss(name, str(error)))
        (packet,) = self._encoder.encode([(name, self.ids(part))])
        count.encoded_tokens += packet.num_tokens
        try:
            self._store.put(packet, part.text, only_known=True)
        except StoreError as error:
            logger.warning("packet %s serves this request only: %s", name, error)
        return packet

    def _new_preamble(self, parts: Sequence[Part]) -> list[int] | None:
        """Tokens before the first packet that are not a packet yet."""
        if len(parts) < 2 or parts[0].packet or not parts[1].packet:
            return None
        return self.ids(parts[0])

    def _keep_preamble(self, ids: list[int], context: Context) -> None:
        """Keep what stood before the first packet as a packet of its own: no adapter, position 0, exact."""
        signature = replace(self._encoder.signature, adapter="none", compression="none", quantization="none")
        tensors = context.extract(Span(0, 0, len(ids)))
        with self._lock:
            self._preambles[tuple(ids)] = Packet(packet_id(ids, signature), signature, tensors, len(ids), len(ids))
            while len(self._preambles) > _MAX_PREAMBLES or self._preamble_bytes() > _MAX_PREAMBLE_BYTES:
                self._preambles.popitem(last=False)

    def _preamble_bytes(self) -> int:
        return sum(packet.size_bytes for packet in self._preambles.values())


def _count(parts: Sequence[Part], num_filled: int, count: _Loading) -> None:
    """Add up the tokens that need not be read: of chunks, and of text that is kept or stands in the context already."""
    for number, part in enumerate(parts):
        if part.packet_id:
            count.packet_tokens += part.num_tokens
        elif part.packet or number < num_filled:
            count.preamble_tokens += part.num_tokens
