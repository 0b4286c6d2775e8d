"""An engine that is loaded when it is first needed, and shared by every model made from it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvpacket_rag import Adapter, KVPacketEngine, KVPacketError, PacketStore
from kvpacket_rag.chunk import MIN_MATCH_TOKENS

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is loaded from; see :meth:`kvpacket_rag.KVPacketEngine.load`."""

    model: str = DEFAULT_MODEL
    store: PacketStore | str | Path | None = None
    adapter: Adapter | str | Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    min_match_tokens: int = MIN_MATCH_TOKENS


class LazyEngine:
    """Stands for one engine, so that a model is made in no time, and copied without its weights.

    Copies share the engine. A pickle holds the options alone; the engine is loaded again where it is
    first needed. One that was made around a given engine cannot be pickled.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options: EngineOptions | None = options
        self._engine: KVPacketEngine | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, engine: KVPacketEngine) -> Self:
        """Around an engine that is there already."""
        lazy = cls(EngineOptions(engine.model_name))
        lazy.options, lazy._engine = None, engine
        return lazy

    @property
    def loaded(self) -> KVPacketEngine | None:
        """The engine, if it has been needed."""
        return self._engine

    def get(self) -> KVPacketEngine:
        """The engine; the first call loads it, and others wait meanwhile."""
        with self._lock:
            if self._engine is None:
                options = {name: getattr(self.options, name) for name in EngineOptions.__slots__}
                self._engine = KVPacketEngine.load(options.pop("model"), **options)
            return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[LazyEngine], tuple[EngineOptions]]:
        if self.options is None:
            raise KVPacketError(
                "a model made from an engine cannot be pickled, for its weights live in this process; make it from "
                "names instead, as in ChatKVPacket(model=..., store=...), and each process loads its own engine"
            )
        return LazyEngine, (self.options,)
