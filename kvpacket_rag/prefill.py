"""From a prompt in parts to a filled context and the logits of the first token.

Packets are loaded, realigned and laid end to end; only text is read by the model. A packet that
cannot be used is encoded again from its text and counted as a miss, so a doubt never becomes a
wrong answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvpacket_rag.answer import Miss
from kvpacket_rag.assemble import Assembly, Context, Filled, Key, Span
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.device_errors import is_out_of_memory
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import ContextTooLongError, DeviceError, PromptError
from kvpacket_rag.loading import Loaded, PacketLoader, ids_of
from kvpacket_rag.parts import Part
from kvpacket_rag.preamble import Preambles, pieces
from kvpacket_rag.runner import BoundContext
from kvpacket_rag.store import PacketStore

logger = logging.getLogger(__name__)

_NO_ROOM = "memory ran out while its packet was laid out, so its text was read instead"
_PIECE = 256  # tokens of a forward where memory is short


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


class Prefiller:
    """Fills contexts for one engine.

    Args:
        backbone: the model.
        encoder: makes the packets that are missing.
        store: keeps them.

    Attributes:
        loader: gets the packets.
    """

    def __init__(self, backbone: Backbone, encoder: PacketEncoder, store: PacketStore) -> None:
        self._backbone = backbone
        self._encoder = encoder
        self.loader = PacketLoader(encoder, store)
        self._preambles = Preambles(encoder.signature)

    def num_positions(self, parts: Sequence[Part]) -> int:
        """Positions a prompt takes, soft tokens of its packets included; the slots it takes are no more."""
        soft = self._encoder.adapter.stored_tokens * sum(part.packet_id is not None for part in parts)
        return soft + sum(part.num_tokens for part in parts)

    def check_length(self, parts: Sequence[Part], max_new_tokens: int) -> None:
        """Refuse what cannot fit, before any work.

        Raises:
            PromptError: there is nothing to read.
            ContextTooLongError: prompt and answer take more positions than the model has.
        """
        prompt = self.num_positions(parts)
        soft = prompt - sum(part.num_tokens for part in parts)
        window = self._backbone.context_window
        if not parts:
            raise PromptError("the prompt is empty; expected at least one token of text")
        if prompt + max_new_tokens > window:
            raise ContextTooLongError(
                f"the prompt takes {prompt} positions ({soft} of them soft tokens) and the answer may take "
                f"{max_new_tokens}, together more than the {window} of {self._backbone.name}; "
                "retrieve fewer or shorter chunks, or lower max_new_tokens",
                room=window - prompt,
            )

    def all_ids(self, parts: Sequence[Part]) -> list[int]:
        """Tokens of the whole prompt, chunks included."""
        return [token for part in parts for token in ids_of(self._backbone, part)]

    def run(self, parts: Sequence[Part], max_new_tokens: int) -> Prefilled:
        """Load, assemble, prefill.

        Where memory runs out, what is kept for later prompts is let go of, and packets and text go through memory in
        smaller pieces. Where that is not enough, chunks are read from their text, which counts as misses.

        Args:
            parts: of the prompt; those with a packet id are taken from packets.
            max_new_tokens: room to leave for the answer.

        Raises:
            DeviceError: there is no room for the context.
        """
        names = [part.packet_id for part in parts if part.packet_id]
        with self.loader.holding(parts):
            found = self._try(parts, max_new_tokens)
            if found is None:
                self.free()
                found = self._try(parts, max_new_tokens, sparing=True)
            if found is None and names:
                text = [replace(part, packet_id=None) for part in parts]
                found = self._try(text, max_new_tokens, sparing=True)
                if found is not None:
                    found.misses += tuple(Miss(name, _NO_ROOM) for name in names)
        if found is None:
            self.free()
            tokens = self.num_positions(parts) + max_new_tokens
            raise DeviceError(
                f"the memory of {self._backbone.device} has no room for a prompt and answer of {tokens} tokens, whose "
                f"keys and values take {tokens * self._backbone.pool.slot_bytes} bytes; retrieve fewer or shorter "
                "chunks, lower max_new_tokens, or free memory"
            )
        return found

    def free(self) -> None:
        """Let go of what is kept for later prompts: contexts, preambles, and copies of packets in faster memory."""
        self._preambles.clear()
        self.loader.drop_copies()
        self._backbone.pool.drop_idle()

    def _try(self, parts: Sequence[Part], max_new_tokens: int, sparing: bool = False) -> Prefilled | None:
        """What :meth:`run` gives, or None where memory runs out; the error and what it keeps alive is gone by then."""
        try:
            loaded = self.loader.load(parts, sparing)
            context = self._take(loaded, max_new_tokens)
            try:
                return self.fill(loaded, context, sparing)
            except BaseException:
                self._backbone.pool.give_back(context)
                raise
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("memory of %s ran out while a prompt was assembled: %s", self._backbone.device, str(error))
            return None

    def fill(self, loaded: Loaded, context: Context, sparing: bool = False) -> Prefilled:
        """Assemble and prefill.

        Args:
            loaded: its packets are let go of.
            context: has room for the prompt, behind what it is filled with already.
            sparing: read text in small pieces.
        """
        started = time.perf_counter()
        parts = loaded.parts
        preamble, is_fresh = self._find_preamble(parts), not context.filled
        packet_tokens, kept_tokens = _known_tokens(parts, len(context.filled))
        texts, filled = self._lay_out(parts, context)
        seconds = time.perf_counter() - started
        bound = self._backbone.bind(context)
        rest = texts
        if preamble is not None and is_fresh:  # read alone, so that rounding is the same when it is kept
            self._read_preamble(bound, *texts[0], sparing)
            rest = texts[1:]
        logits = self._read(bound, rest, sparing)
        context.filled = filled
        if preamble is not None:
            self._preambles.keep(preamble, context)
        read = sum(len(ids) for _, ids in texts) + loaded.encoded_tokens
        counts = packet_tokens - loaded.encoded_tokens, kept_tokens, read
        told = tuple(loaded.reused), tuple(loaded.misses)
        return Prefilled(context, bound, logits, *counts, *told, loaded.seconds, seconds)

    def _take(self, loaded: Loaded, max_new_tokens: int) -> Context:
        """A context with room for the parts, if possible one that an earlier prompt filled with the first of them."""
        slots, pool = loaded.num_slots + max_new_tokens, self._backbone.pool
        return pool.take_filled([self._key(part) for part in loaded.parts[:-1]], slots) or pool.take(slots)

    def _key(self, part: Part) -> Key:
        """What the slots of a part hold, given those before it."""
        return part.packet_id or tuple(ids_of(self._backbone, part))

    def _find_preamble(self, parts: list[Part]) -> list[int] | None:
        """Take text before the first packet, or its beginning, from an earlier prompt; its tokens if some are new."""
        if len(parts) < 2 or parts[0].packet or not parts[1].packet:
            return None
        ids = ids_of(self._backbone, parts[0])
        found = self._preambles.find(ids)
        parts[0] = replace(parts[0], packet=found)
        return None if found is not None and found.num_tokens == len(ids) else ids

    def _lay_out(self, parts: list[Part], context: Context) -> tuple[list[tuple[Span, list[int]]], tuple[Filled, ...]]:
        """Write packets into the context and reserve room for text, behind what it is filled with already.

        Each packet is let go of once it is written. The context counts as filled with nothing until its texts are
        read; should that fail, no later prompt goes on with it.

        Returns:
            The places of the texts and their tokens, and what the context is filled with once they are read.
        """
        texts: list[tuple[Span, list[int]]] = []
        assembly = Assembly(context)
        filled, context.filled = list(context.filled), ()
        for part in parts[len(filled) :]:
            ids = [] if part.packet and part.packet_id else ids_of(self._backbone, part)
            if part.packet:
                assembly.add(part.packet)
                ids = ids[part.packet.num_tokens :]
                part.packet = None  # unmaps the file, so that its pages do not stand beside their copy
            if ids:
                texts.append((context.reserve(len(ids)), ids))
            filled.append(Filled(self._key(part), context.num_slots, context.num_positions))
        assembly.write()
        return texts, tuple(filled)

    def _read_preamble(self, bound: BoundContext, place: Span, ids: list[int], sparing: bool) -> None:
        """Have the model read the end of a preamble, piece by piece."""
        for start, stop in pieces(place.slot, place.slot + len(ids)):
            begin = start - place.slot
            span = Span(start, place.position + begin, stop - start)
            self._read(bound, [(span, ids[begin : begin + span.num_tokens])], sparing)

    def _read(self, bound: BoundContext, texts: Sequence[tuple[Span, list[int]]], sparing: bool) -> Tensor:
        """Have the model read the texts at their places; (1, vocabulary) logits behind the last."""
        if not sparing:
            return self._backbone.prefill(bound, texts)
        for span, ids in texts:
            for start in range(0, len(ids), _PIECE):
                piece = ids[start : start + _PIECE]
                place = Span(span.slot + start, span.position + start, len(piece))
                logits = self._backbone.prefill(bound, [(place, piece)])
        return logits


def _known_tokens(parts: Sequence[Part], num_filled: int) -> tuple[int, int]:
    """Tokens that need not be read: of chunks, and of text that is kept or stands in the context already."""
    chunks = sum(part.num_tokens for part in parts if part.packet_id)
    texts = [(number, part) for number, part in enumerate(parts) if not part.packet_id]
    kept = [part.num_tokens if n < num_filled else part.packet.num_tokens if part.packet else 0 for n, part in texts]
    return chunks, sum(kept)
