"""An engine that is loaded when it is first needed, and shared by all who ask for the same one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet, WeakValueDictionary

from kvpacket_rag import Adapter, KVPacketEngine, KVPacketError, PacketStore, StoreError
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.hardware import pick_device, pick_dtype
from kvpacket_rag.models import resolve_model
from kvpacket_rag.namespace import local_path
from kvpacket_rag.store import is_url

DEFAULT_MODEL = "smollm2-135m-instruct"
_OF_MODELS = frozenset((".bin", ".gguf", ".jinja", ".json", ".model", ".pt", ".safetensors", ".txt"))
Stamps = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is loaded from; see :meth:`kvpacket_rag.KVPacketEngine.load`."""

    model: str = DEFAULT_MODEL
    store: PacketStore | str | Path | None = None
    adapter: Adapter | str | Path | None = "auto"
    device: str = "auto"
    dtype: str = "auto"
    min_match_tokens: int = MIN_MATCH_TOKENS
    model_kwargs: Mapping[str, Any] | tuple[tuple[str, Any], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("store", "adapter"):
            object.__setattr__(self, name, absolute(getattr(self, name)))
        if Path(self.model).expanduser().is_dir():
            object.__setattr__(self, "model", absolute(self.model))
        # In one order, so that equal options are equal keys.
        object.__setattr__(self, "model_kwargs", tuple(sorted(dict(self.model_kwargs).items())))


def absolute(place: Any) -> Any:
    """A path as a string that names the same place whatever the working folder is later; what is no path as it is."""
    if isinstance(place, Path) or (isinstance(place, str) and place != "auto" and not is_url(place)):
        return str(local_path(place).expanduser().absolute())
    return place


def is_model(engine: KVPacketEngine, name: str) -> bool:
    """Whether a name can stand for an engine's model: its own in any spelling; any, if it was loaded without one."""
    own = engine.model_name
    return name == own or own == type(engine.backbone.model).__name__ or _place(name) == _place(own)


def _place(model: str) -> Path | str:
    try:
        found = resolve_model(model)
    except KVPacketError:
        return model
    return found.resolve() if isinstance(found, Path) else found


OPTION_NAMES = tuple(option.name for option in fields(EngineOptions))
_engines: WeakValueDictionary[tuple[EngineOptions, Stamps], KVPacketEngine] = WeakValueDictionary()
_asked_for: WeakSet[LazyEngine] = WeakSet()
_loading = threading.Lock()
_naming = threading.Lock()


def load_engine(options: EngineOptions) -> KVPacketEngine:
    """The engine of these options: one a process, for as long as anybody holds it and its files stay as they are.

    So a vector store and a model that were made apart from the same names share weights and packets.
    """
    exact = _exact(options)
    with _loading:
        key = exact, _stamps(exact)
        engine = _engines.get(key)
        if engine is None:
            values = {name: getattr(exact, name) for name in OPTION_NAMES if name not in ("model", "model_kwargs")}
            values |= {"model_kwargs": dict(exact.model_kwargs)} if exact.model_kwargs else {}
            engine = _engines[key] = KVPacketEngine.load(options.model, **values)
        return engine


def only_engine() -> KVPacketEngine:
    """The engine that all models of this process are over; the default model's where there are no models yet.

    Raises:
        StoreError: they are over several.
    """
    if len(_engines_in_use()) > 1:
        gc.collect()  # models that nobody has any more, but that wait in a circle of references
    if len(asked := _engines_in_use()) > 1:
        raise StoreError(
            f"models over {len(asked)} different engines are in use, so it must be said which of them the packets are "
            "for; pass the engine of the model that answers, as in engine=chat.engine"
        )
    return next((lazy.get() for lazy in asked.values()), None) or load_engine(EngineOptions())


def _engines_in_use() -> dict[KVPacketEngine | EngineOptions, LazyEngine]:
    with _naming:
        models = list(_asked_for)
    return {lazy.loaded or _wanted(lazy.options or EngineOptions()): lazy for lazy in models}


def _wanted(options: EngineOptions) -> KVPacketEngine | EngineOptions:
    """The engine of these options if it is loaded, or else the options."""
    exact = _exact(options)
    return _engines.get((exact, _stamps(exact))) or exact


def _exact(options: EngineOptions) -> EngineOptions:
    """The options with everything looked up that several words can stand for."""
    device = pick_device(options.device)
    dtype = str(pick_dtype(options.dtype, device)).removeprefix("torch.")
    model = resolve_model(options.model)
    model = str(model.absolute()) if isinstance(model, Path) else model
    return replace(options, model=model, device=str(device), dtype=dtype)


def _stamps(options: EngineOptions) -> Stamps:
    """What the files of model and adapter look like from outside: under the same names, others may lie there by now."""
    places = [Path(place) for place in (options.model, options.adapter) if isinstance(place, str)]
    files = [file for place in places for file in (sorted(place.iterdir()) if place.is_dir() else [place])]
    stats = [(str(file), file.stat()) for file in files if file.suffix in _OF_MODELS and file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


class LazyEngine:
    """Stands for one engine, so that a model is made in no time, and copied without its weights.

    Copies share the engine. A pickle holds the options alone; the engine is loaded again where it is
    first needed. One that was made around a given engine cannot be pickled.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options: EngineOptions | None = options
        self._engine: KVPacketEngine | None = None

    @classmethod
    def of(cls, engine: KVPacketEngine) -> Self:
        """Around an engine that is there already."""
        lazy = cls(EngineOptions(engine.model_name))
        lazy.options, lazy._engine = None, engine
        return lazy

    def take_into_use(self) -> Self:
        """A model is over it from now on, so that stores can find it: see :func:`only_engine`."""
        with _naming:
            _asked_for.add(self)
        return self

    @property
    def loaded(self) -> KVPacketEngine | None:
        """The engine, if it has been needed."""
        return self._engine

    def get(self) -> KVPacketEngine:
        """The engine; the first call loads it, and others wait meanwhile."""
        if self._engine is None and self.options is not None:
            self._engine = load_engine(self.options)
        assert self._engine is not None  # __init__ sets options, of() the engine
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[[EngineOptions], LazyEngine], tuple[EngineOptions]]:
        if self.options is None:
            raise KVPacketError(
                "a model made from an engine cannot be pickled, for its weights live in this process; make it from "
                "names instead, as in ChatKVPacket(model=..., store=...), and each process loads its own engine"
            )
        return _unpickled, (self.options,)


def _unpickled(options: EngineOptions) -> LazyEngine:
    return LazyEngine(options).take_into_use()
