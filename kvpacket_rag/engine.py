"""The engine: one model, one adapter, one store. What every integration holds, and all it needs to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.answering import Answering
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.compress.compression import Compression
from kvpacket_rag.compress.reduction import UNREDUCED, Reduction
from kvpacket_rag.compress.scheme import Scheme
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.errors import AdapterError, KVPacketError
from kvpacket_rag.hardware import pick_device, pick_dtype
from kvpacket_rag.models import load_model
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.packet_writer import PacketWriter
from kvpacket_rag.reading import Policy as Policy
from kvpacket_rag.shipped import check_adapter, find_adapter
from kvpacket_rag.store import MemoryStore, PacketStore, open_store

SINK = 1  # before bare chunks; see benchmarks/sink.py


class KVPacketEngine(Answering):
    """Encodes chunks into packets and answers prompts from them.

    Safe to use from many threads: each request owns its context, and a lock is held for single
    forward steps only.

    Args:
        backbone: the model.
        store: where packets are kept; a fresh :class:`MemoryStore` by default.
        adapter: soft tokens around every chunk; none by default.
        sink: tokens read before every chunk and left out of its packet; see :class:`PacketEncoder`.
        min_match_tokens: shorter chunks are not looked for in a prompt, for they occur by chance.
        reduction: what makes packets smaller; nothing by default.

    Example:
        >>> engine = KVPacketEngine.load("smollm2-135m-instruct", store="packets")   # doctest: +SKIP
        >>> engine.encode([text])                                                    # doctest: +SKIP
        >>> engine.generate([Message("user", f"{text}\\n\\nWho signed it?")]).text     # doctest: +SKIP
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PacketStore | None = None,
        adapter: Adapter | None = None,
        sink: int = 0,
        min_match_tokens: int = MIN_MATCH_TOKENS,
        reduction: Reduction = UNREDUCED,
    ) -> None:
        _require_parts(backbone, store)
        adapter = Adapter.empty(backbone.hidden_size) if adapter is None else adapter
        if not isinstance(adapter, Adapter):
            raise AdapterError(f"adapter is a {type(adapter).__name__}; pass an Adapter, such as Adapter.load(file)")
        check_adapter(adapter, backbone)
        encoder = PacketEncoder(backbone, adapter, sink, reduction=reduction)
        super().__init__(encoder, MemoryStore() if store is None else store, min_match_tokens)
        self.writer = PacketWriter(encoder, self.store, self._prefiller.free)

    @classmethod
    def load(
        cls,
        model: str = "smollm2-135m-instruct",
        *,
        store: PacketStore | str | Path | None = None,
        adapter: Adapter | str | Path | None = "auto",
        sink: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        min_match_tokens: int = MIN_MATCH_TOKENS,
        compress: str | Compression | None = None,
        quantize: str | Scheme | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
    ) -> KVPacketEngine:
        """Load a model by short name, path or hub name, prove it fit for packets, and open a store.

        Args:
            model: such as ``"smollm2-135m-instruct"``.
            store: a store, a folder for one on disk, a URL such as ``s3://bucket/packets`` (see
                :class:`~kvpacket_rag.store.RemoteStore`), or None for memory.
            adapter: an adapter or its file; ``"auto"`` for the one that ships for these weights, if there is
                one; None for bare chunks.
            sink: tokens read before every chunk and left out of its packet; None for as many as help
                bare chunks, and none under an adapter.
            device: ``"auto"`` takes CUDA, then MPS, then the CPU.
            dtype: ``"auto"`` takes bfloat16 where the device computes it fast, else float32.
            min_match_tokens: see the class.
            compress: a press and the share of every packet's tokens that it removes, such as ``"reread:0.3"``;
                None to keep all. Answers change, the more the more is removed.
            quantize: ``"int8"``, ``"k8v4"`` (smaller) or ``"int4"`` (smallest, with a loss); None for the model's own
                numbers.
            model_kwargs: for transformers, such as ``cache_dir``, ``token`` or ``revision``; see
                :func:`~kvpacket_rag.pretrained.passed_on`.
            tokenizer_kwargs: the same for the tokenizer alone.

        Raises:
            KVPacketError: an argument for transformers cannot have its effect.
            ModelNotFoundError: no such model.
            UnsupportedModelError: the model cannot be served from packets.
            AdapterError: the adapter does not fit, or is of another model.
            PacketError: there is no such press or no such way to quantise.
            MissingExtraError: what was asked for needs a library that is not installed.
        """
        reduction = Reduction.of(compress, quantize)
        place = pick_device(device)
        loaded, tokenizer = load_model(model, place, pick_dtype(dtype, place), model_kwargs, tokenizer_kwargs)
        return cls.around(Backbone(loaded, tokenizer, model), store, adapter, sink, min_match_tokens, reduction)

    @classmethod
    def around(
        cls,
        backbone: Backbone,
        store: PacketStore | str | Path | None = None,
        adapter: Adapter | str | Path | None = "auto",
        sink: int | None = None,
        min_match_tokens: int = MIN_MATCH_TOKENS,
        reduction: Reduction = UNREDUCED,
    ) -> KVPacketEngine:
        """An engine over a model that is loaded already, with all else as :meth:`load` does it.

        Raises:
            AdapterError: the adapter does not fit, or is of another model.
        """
        if isinstance(store, str | Path):
            store = open_store(store)
        if isinstance(adapter, str | Path):
            adapter = find_adapter(backbone) if str(adapter) == "auto" else Adapter.load(adapter)
        if sink is None:
            sink = SINK if adapter is None or (isinstance(adapter, Adapter) and adapter.is_empty) else 0
        return cls(backbone, store, adapter, sink, min_match_tokens, reduction)

    @property
    def model_name(self) -> str:
        """As the model was asked for."""
        return self.backbone.name

    @property
    def context_window(self) -> int:
        """Positions a prompt and its answer may take together."""
        return self.backbone.context_window

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer renders chat messages itself."""
        return bool(getattr(self.backbone.tokenizer, "chat_template", None))

    @property
    def signature(self) -> PacketSignature:
        """What a packet must carry to be read here."""
        return self.encoder.signature

    def encode(
        self,
        texts: Sequence[str],
        owners: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Make sure every chunk has a packet in the store; those that have one cost nothing.

        Args:
            texts: of the chunks; white space at their edges does not count.
            owners: one name a chunk; a packet lives as long as one of its owners.
            progress: called with tokens done and tokens in all, as packets are finished.

        Returns:
            Packet ids, one a text.

        Raises:
            DocumentError: a text is empty or longer than the model's window; nothing was encoded.
            DeviceError: memory ran out for a single chunk; what was encoded before stays.
            StoreFullError: no room; what was stored before stays.
        """
        return self.writer.write_missing(texts, owners, progress)

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """Forget owners; delete and return the packets that have none left."""
        return self.store.drop_owners(owners)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def _require_parts(backbone: object, store: object) -> None:
    """Refuse what is no model or no store, such as their names.

    Raises:
        KVPacketError: it is none.
    """
    if not isinstance(backbone, Backbone):
        raise KVPacketError(
            f"backbone is a {type(backbone).__name__}, expected a Backbone; load a model by its name with "
            "KVPacketEngine.load(model)"
        )
    if store is not None and not isinstance(store, PacketStore):
        raise KVPacketError(
            f"store is a {type(store).__name__}, expected a packet store such as DiskStore(folder); "
            "KVPacketEngine.load and KVPacketEngine.around take a folder or URL too"
        )
