"""What chat model and text model have in common: where the engine comes from, and how it decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from langchain_core.language_models import LangSmithParams
from pydantic import AliasChoices, BaseModel, Field, ValidationInfo, field_validator, model_validator

from kvpacket_rag import Answer, AnswerStream, GenerationSettings, KVPacketEngine, Message, PromptError
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.engine import Policy
from langchain_kvpacket.lazy_engine import DEFAULT_MODEL, EngineOptions, LazyEngine

PROVIDER = "kvpacket"
_OPTION_NAMES = tuple(field.name for field in fields(EngineOptions))
_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_CALL_WORDS = (*_SETTINGS, "max_tokens", "max_new_tokens", "model", "policy", "chat_template_kwargs")
_IGNORED = ("stream", "timeout", "max_retries", "api_key")  # LangChain's own switch, and what only a server needs
_TOOL_WORDS = ("tools", "tool_choice", "functions", "function_call", "response_format")
NO_TOOLS = (
    "tool calling and structured output are not supported: answers from packets are plain text. Retrieve in the chain "
    "instead of through a tool, and parse the answer with an output parser; for an agent, use another chat model"
)


@dataclass(frozen=True, slots=True)
class Call:
    """How one call is to be answered."""

    settings: GenerationSettings
    policy: Policy
    template_kwargs: Mapping[str, Any] | None

    def stream(self, engine: KVPacketEngine, prompt: str | Sequence[Message]) -> AnswerStream:
        """The engine's answer on its way; raises what the engine raises."""
        return engine.stream(prompt, self.settings, policy=self.policy, template_kwargs=self.template_kwargs)


class EngineFields(BaseModel):
    """Fields of a model over an engine. Construction loads nothing; the first call does."""

    model: str = Field(default=DEFAULT_MODEL, validation_alias=AliasChoices("model", "model_name", "model_id"))
    """Short name, path or hub name."""
    store: Any = None
    """Folder or :class:`kvpacket_rag.PacketStore` of the packets; None for memory."""
    adapter: Any = None
    """Adapter or its file; None for bare chunks."""
    device: str = "auto"
    """CUDA, then MPS, then the CPU."""
    dtype: str = "auto"
    """bfloat16 where the device computes it fast, else float32."""
    min_match_tokens: int = MIN_MATCH_TOKENS
    """Shorter chunks are not looked for in a prompt."""
    policy: Policy = "packets"
    """``"prefill"`` reads every prompt in full."""
    max_tokens: int | None = Field(default=None, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))
    """Most tokens of an answer."""
    temperature: float | None = None
    """0 takes the most likely token each time."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    """Of the draw; None for a new one each time."""
    stop: list[str] | None = Field(default=None, validation_alias=AliasChoices("stop", "stop_sequences"))
    """Texts at which an answer ends; they are cut from it. A call's own ``stop`` replaces them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed on to the model's chat template."""
    timeout: Any = Field(default=None, exclude=True, repr=False)
    """Accepted, as are the next two, because code written for a server passes it. There is none: no effect."""
    max_retries: Any = Field(default=None, exclude=True, repr=False)
    api_key: Any = Field(default=None, exclude=True, repr=False)
    shared_engine: Any = Field(default=None, alias="engine", exclude=True, repr=False, validate_default=True)
    """Pass ``engine=``, an engine that is there already, instead of the first six fields."""

    @field_validator("shared_engine")
    @classmethod
    def _share_engine(cls, value: Any, info: ValidationInfo) -> LazyEngine | None:
        if any(name not in info.data for name in _OPTION_NAMES):
            return None  # the error of that field is reported
        options = EngineOptions(**{name: info.data[name] for name in _OPTION_NAMES})
        lazy = LazyEngine.of(value) if isinstance(value, KVPacketEngine) else value
        if lazy is None:
            return LazyEngine(options)
        if not isinstance(lazy, LazyEngine):
            raise ValueError(f"engine is of type {type(value).__name__}, expected a KVPacketEngine")
        if lazy.options is not None:  # this is a copy, perhaps with another model
            return lazy if lazy.options == options else LazyEngine(options)
        name = lazy.get().model_name
        expected = EngineOptions(options.model if options.model in (DEFAULT_MODEL, name) else name)
        if wrong := [field for field in _OPTION_NAMES if getattr(options, field) != getattr(expected, field)]:
            raise ValueError(
                f"an engine of model {name!r} was given, so {', '.join(wrong)} can have no effect; leave that out, or "
                "pass no engine"
            )
        return lazy

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.shared_engine.options is None:
            self.model = self.engine.model_name
        try:
            self._call(None, {})
        except PromptError as error:
            raise ValueError(str(error)) from error
        return self

    @classmethod
    def from_engine(cls, engine: KVPacketEngine, **fields: Any) -> Self:
        """A model over an engine that is there already, so that weights and packets are shared."""
        return cls(engine=engine, **fields)

    @property
    def engine(self) -> KVPacketEngine:
        """The engine; loaded here, if nothing needed it before."""
        engine: KVPacketEngine = self.shared_engine.get()
        return engine

    def _call(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Call:
        """How to answer one call: as it says itself, and as the model's fields say for the rest.

        Raises:
            PromptError: an argument is unknown or out of its range, asks for tools, or names another model.
        """
        self._check_arguments(kwargs)
        values = {name: _first(kwargs.get(name), getattr(self, name)) for name in _SETTINGS}
        values["max_new_tokens"] = _first(kwargs.get("max_tokens"), kwargs.get("max_new_tokens"), self.max_tokens)
        stops = _first(stop, self.stop, ())
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        settings = GenerationSettings(stop=stops, **{name: v for name, v in values.items() if v is not None})
        template_kwargs = {**(self.chat_template_kwargs or {}), **(kwargs.get("chat_template_kwargs") or {})}
        return Call(settings, _first(kwargs.get("policy"), self.policy), template_kwargs or None)

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        if any(kwargs.get(name) for name in _TOOL_WORDS):
            raise PromptError(NO_TOOLS)
        if unknown := sorted(kwargs.keys() - {*_CALL_WORDS, *_IGNORED, *_TOOL_WORDS}):
            known = ", ".join(sorted([*_CALL_WORDS, "stop"]))
            raise PromptError(f"the call has the unknown argument {', '.join(unknown)}; it takes {known}")
        if kwargs.get("model") not in (None, self.model):
            raise PromptError(
                f"the call asks for model {kwargs['model']!r}, but this one answers as {self.model!r}; make "
                "another, for packets are of one model alone"
            )

    def _identity(self) -> dict[str, Any]:
        """What an answer depends on besides the prompt: the key of LangChain's answer cache.

        Once the engine is loaded, that is the content of weights, tokenizer, adapter and dtype, not their names.
        """
        engine = self.shared_engine.loaded
        call = self._call(None, {})
        settings = asdict(call.settings)
        stops = settings.pop("stop")  # LangChain puts the call's own under this name
        return {
            "model": self.model,
            "packets": engine.signature.digest if engine else "not loaded",
            "policy": call.policy,
            "chat_template_kwargs": call.template_kwargs,
            "stops_by_default": stops,
            **settings,
        }

    def _trace(self, params: LangSmithParams, stop: list[str] | None) -> LangSmithParams:
        """LangSmith's parameters, completed."""
        params["ls_provider"] = PROVIDER
        if stops := _first(stop, self.stop):
            params["ls_stop"] = stops
        return params


def answer_facts(model: str, answer: Answer) -> dict[str, Any]:
    """What an answer cost, as JSON can hold it."""
    usage = answer.usage
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        "chunks_reused": usage.chunks_reused,
        "packet_tokens": usage.packet_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "misses": [asdict(miss) for miss in usage.misses],
        "timings": asdict(answer.timings),
    }


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
