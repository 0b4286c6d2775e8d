"""What chat model and text model have in common: where the engine comes from, and how it decodes and reuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from langchain_core.language_models import BaseLanguageModel, LangSmithParams
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import run_in_executor
from pydantic import ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from kvpacket_rag import Answer, AnswerStream, GenerationSettings, KVPacketEngine, KVPacketError, PromptError, Reuse
from kvpacket_rag import __version__ as version
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.engine import Policy
from kvpacket_rag.reading import Match, OnMiss
from langchain_kvpacket.call import PROVIDER, Call, Prompt, as_tuple, first, packets_at, usage_counts
from langchain_kvpacket.huggingface import OTHER_WORDS, call_arguments, constructor_arguments
from langchain_kvpacket.lazy_engine import DEFAULT_MODEL, OPTION_NAMES, EngineOptions, LazyEngine, absolute, is_model
from langchain_kvpacket.plain_errors import PlainErrors
from langchain_kvpacket.retrieved import RETRIEVED

_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_REUSE = ("match", "on_miss")
_SHARED = ("policy", "encode_retrieved", "max_tokens", "stop", "chat_template_kwargs")
_CALL_WORDS = (*_SETTINGS, *_REUSE, "kv_hint", "max_tokens", "model", "policy", "chat_template_kwargs")
_IGNORED = ("stream", "timeout", "max_retries", "api_key")  # LangChain's own switch, and what only a server needs
_TOOL_WORDS = ("tools", "tool_choice", "functions", "function_call", "response_format")
_NO_TOOLS = (
    "the call has {}, but tool calling and structured output are not supported this way; bind tools to a ChatKVPacket "
    "by bind_tools, and parse an answer with an output parser"
)


class EngineFields(PlainErrors, BaseLanguageModel[Any]):
    """A model over an engine. Construction loads nothing; the first call does.

    Arguments of langchain-huggingface's classes are taken too; see :mod:`langchain_kvpacket.huggingface`.
    """

    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)
    other_words = OTHER_WORDS

    model: str = DEFAULT_MODEL
    """Short name, path or hub name; ``model_name`` and ``model_id`` are other words for it."""
    store: Any = None
    """Folder or :class:`kvpacket_rag.PacketStore` of the packets; None for memory."""
    adapter: Any = "auto"
    """Adapter or its file; ``"auto"`` for the one that ships for these weights, None for bare chunks."""
    device: str = "auto"
    """CUDA, then MPS, then the CPU."""
    dtype: str = "auto"
    """bfloat16 where the device computes it fast, else float32."""
    min_match_tokens: int = MIN_MATCH_TOKENS
    """Shorter chunks are not looked for in a prompt."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Of transformers' ``from_pretrained``, such as cache_dir, token and revision; see KVPacketEngine.load."""
    policy: Policy = "packets"
    """``"prefill"`` reads every prompt in full."""
    match: Match = "auto"
    """``"auto"`` looks for every known chunk, ``"hints"`` for a call's ``kv_hint`` only, ``"off"`` for none."""
    on_miss: OnMiss = "prefill"
    """A miss is counted; ``"warn"`` logs it too, ``"error"`` raises PacketMissError in place of an answer."""
    encode_retrieved: bool = True
    """What any LangChain retriever found gets a packet when a prompt first holds it, if it has none. Not with
    ``on_miss="error"``, and not in a folder, where a packet would outlive its document: see KVPacketRetriever."""
    max_tokens: int | None = None
    """Most tokens of an answer, 256 by default; ``max_new_tokens`` is another word for it."""
    temperature: float | None = None
    """0 takes the most likely token each time."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """Of the draw; None for a new one each time."""
    stop: list[str] | None = None
    """Texts at which an answer ends; they are cut from it. A call's own ``stop`` replaces them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed on to the model's chat template."""
    timeout: Any = Field(default=None, exclude=True, repr=False)
    """Accepted, as are the next two, because code written for a server passes it. There is none: no effect."""
    max_retries: Any = Field(default=None, exclude=True, repr=False)
    api_key: Any = Field(default=None, exclude=True, repr=False)
    shared_engine: Any = Field(default=None, alias="engine", exclude=True, repr=False, validate_default=True)
    """Pass ``engine=``, an engine that is there already, instead of the first seven fields."""

    _usages: list[dict[str, Any]] = PrivateAttr(default_factory=list)  # the last, or none while one is written

    @model_validator(mode="before")
    @classmethod
    def _take_other_words(cls, values: dict[str, Any]) -> dict[str, Any]:
        return constructor_arguments(values)

    @field_validator("store", "adapter")
    @classmethod
    def _name_one_place(cls, value: Any) -> Any:
        return absolute(value)

    @field_validator("shared_engine")
    @classmethod
    def _share_engine(cls, value: Any, info: ValidationInfo) -> LazyEngine | None:
        if any(name not in info.data for name in OPTION_NAMES):
            return None  # the error of that field is reported
        options = EngineOptions(**{name: info.data[name] for name in OPTION_NAMES})
        lazy = LazyEngine.of(value) if isinstance(value, KVPacketEngine) else value
        if lazy is None:
            return LazyEngine(options)
        if not isinstance(lazy, LazyEngine):
            raise KVPacketError(f"engine is of type {type(value).__name__}, expected a KVPacketEngine")
        if lazy.options is not None:  # this is a copy, perhaps with another model
            return lazy if lazy.options == options else LazyEngine(options)
        name = lazy.get().model_name
        is_same = options.model == DEFAULT_MODEL or is_model(lazy.get(), options.model)
        expected = EngineOptions(options.model if is_same else name)
        if wrong := [field for field in OPTION_NAMES if getattr(options, field) != getattr(expected, field)]:
            raise KVPacketError(
                f"an engine of model {name!r} was given, so {', '.join(wrong)} can have no effect; leave that out, or "
                "pass no engine"
            )
        return lazy

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        self._add_version("kvpacket-rag", version)
        if self.shared_engine.options is None:
            self.model = self.engine.model_name
        self._call(None, {})  # raises what is wrong with the fields
        self.shared_engine.take_into_use()
        RETRIEVED.listen()
        return self

    @classmethod
    def from_engine(cls, engine: KVPacketEngine, **fields: Any) -> Self:
        """A model over an engine that is there already, so that weights and packets are shared."""
        return cls(engine=engine, **fields)

    @classmethod
    def from_model_id(cls, model_id: str, task: str | None = None, **fields: Any) -> Self:
        """A model by name, with the arguments that langchain-huggingface's ``from_model_id`` takes; greedy by default.

        Args:
            model_id: short name, path or hub name.
            task: ``"text-generation"``, the only one there is.
            fields: of this class, or device_map, model_kwargs, pipeline_kwargs and batch_size.
        """
        return cls(**{"model": model_id, "task": task, **fields})

    def __copy__(self) -> Self:
        copy = super().__copy__()
        copy._usages = []
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        copy = super().__deepcopy__(memo)
        copy._usages = []
        return copy

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; with other fields of those that an engine is loaded from, over another engine.

        Raises:
            KVPacketError: this model was made around an engine, and the copy is to have another model's name.
        """
        update = dict(update or {})
        if update.keys().isdisjoint({*OPTION_NAMES, "engine", "shared_engine"}):
            return super().model_copy(update=update, deep=deep)
        own = self.model_fields_set - update.keys()
        if not update.keys().isdisjoint({"engine", "shared_engine"}):
            own -= {*OPTION_NAMES, "shared_engine"}
        return type(self)(**{name: getattr(self, name) for name in own}, **update)

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base class; :attr:`last_usage` is None from here on, whenever the stream is read."""
        self._usages.clear()
        return super().stream(*args, **kwargs)

    def astream(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`stream`."""
        self._usages.clear()
        return super().astream(*args, **kwargs)

    @property
    def engine(self) -> KVPacketEngine:
        """The engine; loaded here, if nothing needed it before."""
        engine: KVPacketEngine = self.shared_engine.get()
        return engine

    @property
    def last_usage(self) -> dict[str, Any] | None:
        """Counts of tokens and misses of the answer that was finished last, in whichever thread.

        None while the next is being written, and if that one is given up: a stream counts when it was read to its end.
        Where several answers are written at once, an answer's own counts are in its metadata.
        """
        return self._usages[-1] if self._usages else None

    def shared_fields(self) -> dict[str, Any]:
        """What another model takes over that is made around this one: engine, decoding and reuse."""
        names = (*OPTION_NAMES, *_SETTINGS, *_REUSE, *_SHARED)
        return {"engine": self.shared_engine, **{name: getattr(self, name) for name in names}}

    def get_token_ids(self, text: str) -> list[int]:
        """Tokens of a text by the model's own tokenizer."""
        return self.custom_get_token_ids(text) if self.custom_get_token_ids else self.engine.token_ids(text)

    def generate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """As in the base class; the engine is loaded first, for the key of the answer cache needs it."""
        self.shared_engine.get()
        result: LLMResult = super().generate(*args, **kwargs)  # type: ignore[misc]  # of BaseChatModel or BaseLLM
        return result

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """As :meth:`generate`; the engine is loaded in another thread."""
        await run_in_executor(None, self.shared_engine.get)
        result: LLMResult = await super().agenerate(*args, **kwargs)  # type: ignore[misc]
        return result

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop, **kwargs)
        params["ls_provider"] = PROVIDER
        if stops := first(stop, self.stop):
            params["ls_stop"] = stops
        return params

    def _call(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Call:
        """How to answer one call: as it says itself, and as the model's fields say for the rest.

        Raises:
            PromptError: an argument is unknown or out of its range, asks for tools, or names another model.
        """
        kwargs = call_arguments(kwargs, self.temperature)
        self._check_arguments(kwargs)
        values = {name: first(kwargs.get(name), getattr(self, name)) for name in (*_SETTINGS, *_REUSE)}
        reuse = Reuse(match=values.pop("match"), on_miss=values.pop("on_miss"))
        values["max_new_tokens"] = first(kwargs.get("max_tokens"), self.max_tokens)
        stops = first(stop, kwargs.get("stop"), self.stop, ())
        stops = (stops,) if isinstance(stops, str) else as_tuple("stop", stops, "texts")
        settings = GenerationSettings(stop=stops, **{name: v for name, v in values.items() if v is not None})
        own = kwargs.get("chat_template_kwargs") or {}
        if not isinstance(own, Mapping):
            raise PromptError(f"chat_template_kwargs is a {type(own).__name__}, expected a dict of names and values")
        template_kwargs = {**(self.chat_template_kwargs or {}), **own}
        policy = first(kwargs.get("policy"), self.policy)
        hints = as_tuple("kv_hint", kwargs.get("kv_hint") or (), "packet ids or of Documents")
        return Call(settings, policy, template_kwargs, reuse, hints, self.encode_retrieved)

    def _start(self, call: Call, prompt: Prompt) -> AnswerStream:
        """The answer to a call, on its way."""
        self._usages.clear()
        return call.stream(self.engine, prompt, self._note)

    def _answers(self, call: Call, prompts: Sequence[Prompt]) -> list[Answer]:
        """The answers to one call of several prompts."""
        self._usages.clear()
        return call.answers(self.engine, prompts, self._note)

    def _note(self, answer: Answer) -> None:
        self._usages[:] = [usage_counts(answer)]

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        if asked := [name for name in _TOOL_WORDS if kwargs.get(name)]:
            raise PromptError(_NO_TOOLS.format(", ".join(asked)))
        if unknown := sorted(kwargs.keys() - {*_CALL_WORDS, *_IGNORED, *_TOOL_WORDS, "stop"}):
            known = ", ".join(sorted([*_CALL_WORDS, "stop"]))
            raise PromptError(f"the call has the unknown argument {', '.join(unknown)}; it takes {known}")
        if kwargs.get("model") not in (None, self.model):
            raise PromptError(
                f"the call asks for model {kwargs['model']!r}, but this one answers as {self.model!r}; make "
                "another, for packets are of one model alone"
            )

    def _identity(self) -> dict[str, Any]:
        """What an answer depends on besides the prompt: the key of LangChain's answer cache.

        Once the engine is loaded, that is the content of weights, tokenizer, adapter and dtype, not their names; and
        where its packets are, or which they are in memory. A cache on disk serves a later process that has the same.
        """
        engine = self.shared_engine.loaded
        call = self._call(None, {})
        settings = asdict(call.settings)
        stops = settings.pop("stop")  # LangChain puts the call's own under this name
        return {
            "model": self.model,
            "packets": engine.signature.digest if engine else "not loaded",
            "policy": call.policy,
            "match": call.reuse.match,
            "on_miss": call.reuse.on_miss,
            "encode_retrieved": call.encode_retrieved,
            "min_match_tokens": self.min_match_tokens,
            "store": packets_at(engine) if engine else str(self.store),
            "chat_template_kwargs": call.template_kwargs,
            "stops_by_default": stops,
            **settings,
        }
