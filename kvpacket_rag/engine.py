"""The engine: one model, one adapter, one store. What every integration holds, and all it needs to hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.answer import Answer, AnswerStream, Miss, Timings, Usage
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.decode import GenerationSettings, Sampler, TextStream
from kvpacket_rag.encode import PacketEncoder
from kvpacket_rag.hardware import pick_device, pick_dtype
from kvpacket_rag.models import load_model
from kvpacket_rag.packet import PacketSignature
from kvpacket_rag.packet_writer import PacketWriter
from kvpacket_rag.parts import Part
from kvpacket_rag.prefill import Prefiller
from kvpacket_rag.reading import Policy as Policy
from kvpacket_rag.reading import Prompt, PromptReader, Reuse
from kvpacket_rag.shipped import check_adapter, find_adapter
from kvpacket_rag.store import DiskStore, MemoryStore, PacketStore

_SINK = 1  # see benchmarks/sink.py


class KVPacketEngine:
    """Encodes chunks into packets and answers prompts from them.

    Safe to use from many threads: each request owns its context, and a lock is held for single
    forward steps only.

    Args:
        backbone: the model.
        store: where packets are kept; a fresh :class:`MemoryStore` by default.
        adapter: soft tokens around every chunk; none by default.
        sink: tokens read before every chunk and left out of its packet; see :class:`PacketEncoder`.
        min_match_tokens: shorter chunks are not looked for in a prompt, for they occur by chance.

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
    ) -> None:
        self.backbone = backbone
        self.store: PacketStore = store if store is not None else MemoryStore()
        adapter = adapter or Adapter.empty(backbone.hidden_size)
        check_adapter(adapter, backbone)
        self.encoder = PacketEncoder(backbone, adapter, sink)
        self._writer = PacketWriter(self.encoder, self.store)
        self._prefiller = Prefiller(backbone, self.encoder, self.store)
        self._reader = PromptReader(backbone, self.store, self.encoder.signature, min_match_tokens)

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
    ) -> KVPacketEngine:
        """Load a model by short name, path or hub name, prove it fit for packets, and open a store.

        Args:
            model: such as ``"smollm2-135m-instruct"``.
            store: a store, a folder for one on disk, or None for memory.
            adapter: an adapter or its file; ``"auto"`` for the one that ships for these weights, if there is
                one; None for bare chunks.
            sink: tokens read before every chunk and left out of its packet; None for as many as help
                bare chunks, and none under an adapter.
            device: ``"auto"`` takes CUDA, then MPS, then the CPU.
            dtype: ``"auto"`` takes bfloat16 where the device computes it fast, else float32.
            min_match_tokens: see the class.

        Raises:
            ModelNotFoundError: no such model.
            UnsupportedModelError: the model cannot be served from packets.
            AdapterError: the adapter does not fit, or is of another model.
        """
        place = pick_device(device)
        loaded, tokenizer = load_model(model, place, pick_dtype(dtype, place))
        return cls.around(Backbone(loaded, tokenizer, model), store, adapter, sink, min_match_tokens)

    @classmethod
    def around(
        cls,
        backbone: Backbone,
        store: PacketStore | str | Path | None = None,
        adapter: Adapter | str | Path | None = "auto",
        sink: int | None = None,
        min_match_tokens: int = MIN_MATCH_TOKENS,
    ) -> KVPacketEngine:
        """An engine over a model that is loaded already, with all else as :meth:`load` does it.

        Raises:
            AdapterError: the adapter does not fit, or is of another model.
        """
        if isinstance(store, str | Path):
            store = DiskStore(store)
        if isinstance(adapter, str | Path):
            adapter = find_adapter(backbone) if str(adapter) == "auto" else Adapter.load(adapter)
        if sink is None:
            sink = 0 if adapter and not adapter.is_empty else _SINK
        return cls(backbone, store, adapter, sink, min_match_tokens)

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

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text by the model's own tokenizer, without special tokens."""
        return self.backbone.token_ids(text)

    def count_tokens(self, text: str) -> int:
        """How many they are."""
        return len(self.token_ids(text))

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
            StoreFullError: no room; what was stored before stays.
        """
        return self._writer.write_missing(texts, owners, progress)

    def drop_owners(self, owners: Iterable[str]) -> list[str]:
        """Forget owners; delete and return the packets that have none left."""
        return self.store.drop_owners(owners)

    def generate(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        *,
        policy: Policy = "packets",
        template_kwargs: Mapping[str, Any] | None = None,
        reuse: Reuse | None = None,
    ) -> Answer:
        """Answer a prompt; see :meth:`stream`."""
        return self.stream(prompt, settings, policy=policy, template_kwargs=template_kwargs, reuse=reuse).read_all()

    def stream(
        self,
        prompt: Prompt,
        settings: GenerationSettings | None = None,
        *,
        policy: Policy = "packets",
        template_kwargs: Mapping[str, Any] | None = None,
        reuse: Reuse | None = None,
    ) -> AnswerStream:
        """Answer a prompt piece by piece.

        Args:
            prompt: chat messages, rendered by the model's own template; or a final text, which gets
                the model's beginning-of-sequence token once. Chunks the store knows are found in it.
            settings: how to decode; greedy by default.
            policy: ``"packets"`` reuses what is stored; ``"prefill"`` reads the same text in full.
            template_kwargs: passed on to the chat template.
            reuse: which chunks may come from packets and what a miss does; all known ones and nothing by default.

        Raises:
            PromptError: the prompt is empty or its messages are malformed.
            PacketMissError: a chunk cannot be reused, and ``reuse`` wants that to be an error.
            ContextTooLongError: prompt and answer exceed the window; nothing was computed.
        """
        started = time.perf_counter()
        settings = settings or GenerationSettings()
        self.backbone.check_unchanged()
        reuse = reuse or Reuse()
        parts, misses = self._reader.read(prompt, policy, template_kwargs, reuse)
        reuse.act_on(misses)
        self._prefiller.check_length(parts, settings.max_new_tokens)
        return AnswerStream(self._run(parts, misses, settings, reuse, time.perf_counter() - started))

    def _run(
        self,
        parts: Sequence[Part],
        misses: tuple[Miss, ...],
        settings: GenerationSettings,
        reuse: Reuse,
        reading: float,
    ) -> Generator[str, None, Answer]:
        started = time.perf_counter() - reading
        sampler = Sampler(settings, lambda: self._prefiller.all_ids(parts), self.backbone.device)
        filled = self._prefiller.run(parts, settings.max_new_tokens)
        text = TextStream(self.backbone.decode, settings.stop)
        pieces: list[str] = []
        tokens: list[int] = []
        ends = self.backbone.eos_ids | self.backbone.control_ids(settings.stop)
        first_token = 0.0
        try:
            reuse.act_on(filled.misses)
            logits = filled.logits
            while not text.stopped and len(tokens) < settings.max_new_tokens:
                if tokens:
                    logits = self.backbone.step(filled.bound, filled.context, tokens[-1])
                tokens.append(sampler.pick(logits))
                first_token = first_token or time.perf_counter() - started
                if tokens[-1] in ends:
                    break
                if piece := text.push(tokens[-1]):
                    pieces.append(piece)
                    yield piece
            if piece := text.finish():
                pieces.append(piece)
                yield piece
        finally:
            self.backbone.pool.give_back(filled.context)
        reason: Literal["stop", "length"] = "stop" if text.stopped or tokens[-1] in ends else "length"
        times = Timings(
            reading + filled.load_seconds, filled.assemble_seconds, first_token, time.perf_counter() - started
        )
        counts = filled.packet_tokens, filled.prefilled_tokens, len(tokens), filled.chunks_reused
        return Answer("".join(pieces), tuple(tokens), reason, Usage(*counts, misses + filled.misses), times)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is shared, by copies too

    def close(self) -> None:
        """Close the store."""
        self.store.close()
