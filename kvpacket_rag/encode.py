"""Chunks to packets: tokenise alone, wrap in the adapter, prefill in batches of similar length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.attach import OUTSIDE, attached
from kvpacket_rag.backbone import Backbone, is_unicode
from kvpacket_rag.compress.compressor import Compressor
from kvpacket_rag.compress.quantise import Quantiser
from kvpacket_rag.compress.reduction import UNREDUCED, Reduction
from kvpacket_rag.device_errors import NoRoomError, is_out_of_memory
from kvpacket_rag.errors import AdapterError, DocumentError
from kvpacket_rag.packet import Packet, PacketSignature, packet_id

logger = logging.getLogger(__name__)
NO_MEMORY = "cut documents into smaller chunks, or free memory"
NamedIds = tuple[str, list[int]]  # packet id and token ids of a chunk


class PacketEncoder:
    """Makes packets of one model and one adapter.

    Args:
        backbone: the model.
        adapter: its soft tokens; may be empty.
        sink: read ``sink`` tokens before a chunk and leave them out of its packet. A model puts most of
            its attention on the first token it reads; without a token for that, every chunk's own first
            one becomes such a sink, and several of them in one context disturb each other (LegoLink-0 of
            EPIC, arXiv 2410.15332). Meant for bare chunks; a trained header does this by itself.
        max_batch_tokens: padded tokens of one forward.
        reduction: tokens left out of packets, and numbers stored in few bits; nothing of that by default.

    Raises:
        AdapterError: the adapter is of another hidden size, or the model cannot be fed soft tokens.
        UnsupportedModelError: the model's packets cannot be compressed as asked.
        MissingExtraError: the reduction needs a library that is not installed.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: Adapter,
        sink: int = 0,
        max_batch_tokens: int = 2048,
        reduction: Reduction = UNREDUCED,
    ) -> None:
        if adapter.hidden_size != backbone.hidden_size:
            raise AdapterError(
                f"the adapter has hidden size {adapter.hidden_size}, {backbone.name} has {backbone.hidden_size}; "
                "use an adapter that was trained for this model"
            )
        if adapter.num_tokens and not backbone.report.takes_embeddings:
            raise AdapterError(
                f"{backbone.name} reads token ids beside their embeddings, so soft tokens would be misread; "
                "use it without an adapter"
            )
        self.backbone = backbone
        self.adapter = adapter
        self.sink_ids = backbone.first_ids() * sink if sink else []
        self.max_batch_tokens = max_batch_tokens
        self.reduction = reduction
        self._compressor = self._make_compressor()
        self._quantiser = Quantiser(reduction.scheme) if reduction.scheme else None
        self.signature = PacketSignature(
            weights=backbone.weights_fingerprint,
            tokenizer=backbone.tokenizer_fingerprint,
            adapter=f"{adapter.digest}, sink {self.sink_ids}" if self.sink_ids else adapter.digest,
            rope=backbone.plan.digest,
            dtype=str(backbone.dtype).removeprefix("torch."),
            compression=self._compressor.settings if self._compressor else "none",
            quantization=reduction.scheme.settings if reduction.scheme else "none",
        )

    def _make_compressor(self) -> Compressor | None:
        compression, backbone = self.reduction.compression, self.backbone
        if compression is None:
            return None
        if self.sink_ids and self.adapter.low_rank is not None:
            raise AdapterError(
                "an adapter with a low-rank update and sink tokens before it cannot be used with a press, which would "
                "read the two alike; leave out the sink tokens"
            )
        return Compressor(compression, backbone.model, backbone.plan, backbone.runner.windows)

    @property
    def _extra(self) -> int:
        """Tokens read with every chunk that are not its own."""
        return self.adapter.num_tokens + len(self.sink_ids)

    def identify(self, text: str) -> tuple[str, list[int]]:
        """Packet id and token ids of a chunk; the text counts with its edges stripped.

        Raises:
            DocumentError: the chunk has no text, or more of it than the model's window.
        """
        about = f"the chunk of {len(text)} characters"  # never its text: errors are logged
        if not is_unicode(text):
            raise DocumentError(f"{about} holds a lone surrogate, which no encoding knows; remove it")
        ids = self.backbone.token_ids(text.strip())
        room = self.backbone.context_window - self._extra
        if not ids:
            raise DocumentError(f"{about} holds no text; leave it out")
        if len(ids) > room:
            raise DocumentError(
                f"{about} has {len(ids)} tokens, {self.backbone.name} has room for {room}; cut it into smaller chunks"
            )
        return packet_id(ids, self.signature), ids

    def encode(self, chunks: Sequence[NamedIds], make_room: Callable[[], None] | None = None) -> Iterator[Packet]:
        """Prefill chunks, long ones first, and yield their packets as they come.

        Args:
            chunks: packet id and token ids of each, as :meth:`identify` gives them.
            make_room: frees what is not needed when memory runs out; idle contexts by default.

        Raises:
            DeviceError: memory ran out for a single chunk; shorter ones may still have room.
            PacketMismatchError: the model has become another function.
        """
        for batch in self.batches(chunks):
            yield from self._encode(batch, make_room or self.backbone.pool.drop_idle)

    def _encode(self, batch: Sequence[NamedIds], make_room: Callable[[], None]) -> Iterator[Packet]:
        """One forward; in halves where memory runs out, and chunk by chunk in the end."""
        packets = self._try(batch)
        if packets is None:
            make_room()
            if len(batch) > 1:
                yield from self._encode(batch[: len(batch) // 2], make_room)
                yield from self._encode(batch[len(batch) // 2 :], make_room)
                return
            packets = self._try(batch)
        if packets is None:
            tokens = len(batch[0][1]) + self._extra
            raise NoRoomError(
                f"the memory of {self.backbone.device} has no room to encode a chunk of {tokens} tokens, whose keys "
                f"and values take {tokens * self.backbone.pool.slot_bytes} bytes; {NO_MEMORY}"
            )
        yield from packets

    def _try(self, batch: Sequence[NamedIds]) -> list[Packet] | None:
        """Packets, or None where memory runs out; the error and what it keeps alive is gone by then."""
        try:
            rows = zip(batch, self._prefill([ids for _, ids in batch]), strict=True)
            extra = self.adapter.stored_tokens
            return [
                Packet(name, self.signature, self._quantised(parts), len(ids) + extra, len(ids))
                for (name, ids), parts in rows
            ]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            told = str(error)  # the error itself would keep the tensors of its frames
            logger.warning("memory of %s ran out for %d chunks at once: %s", self.backbone.device, len(batch), told)
            return None

    def _quantised(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keys and values in few bits, if that is asked for; what else a packet stores stays as it is."""
        if self._quantiser is None:
            return parts
        groups = self.backbone.plan.groups
        return (*self._quantiser.quantise(parts[: len(groups)], groups), *parts[len(groups) :])

    @torch.no_grad()
    def _prefill(self, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
        sink = torch.full((len(self.sink_ids),), OUTSIDE)
        roles = torch.nn.utils.rnn.pad_sequence(
            [torch.cat([sink, self.adapter.roles(len(ids))]) for ids in rows], batch_first=True, padding_value=OUTSIDE
        )
        with (
            self.backbone.runner.lock,  # so that no answer is read through the adapter's updates
            attached(self.adapter, self.backbone.model, roles.to(self.backbone.device)),
        ):
            left_out = len(self.sink_ids) + self.adapter.left_out_tokens
            inputs = [self.wrap(ids) for ids in rows]
            if self._compressor is None:
                return self.backbone.encode(inputs, left_out)
            with self._compressor.watching() as seen:
                (tensors,) = self.backbone.encode(inputs, left_out, whole=True)
            soft = self.adapter.roles(len(rows[0]))[self.adapter.left_out_tokens :] < self.adapter.num_tokens
            return [self._compressor.compress(tensors, seen, rows[0], soft)]

    @torch.no_grad()
    def wrap(self, ids: Sequence[int]) -> Tensor:
        """The model's input for a chunk: embeddings in the adapter, or bare ids when there is none."""
        if self.adapter.num_tokens:
            wrapped = self.adapter.wrap(self.backbone.embed(ids))
            return torch.cat([self.backbone.embed(self.sink_ids), wrapped])
        return torch.tensor([*self.sink_ids, *ids], dtype=torch.long)

    def batches(self, chunks: Sequence[NamedIds]) -> Iterator[list[NamedIds]]:
        """The chunks of each forward, long ones first: as many as fit, or one by one for a press.

        It would score padding, and normalise over the batch.
        """
        batch: list[NamedIds] = []
        for chunk in sorted(chunks, key=lambda c: len(c[1]), reverse=True):
            padded = len((batch or [chunk])[0][1]) + self._extra
            if batch and (self._compressor or padded * (len(batch) + 1) > self.max_batch_tokens):
                yield batch
                batch = []
            batch.append(chunk)
        if batch:
            yield batch
