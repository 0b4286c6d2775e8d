"""What a KVPacketLLM is made from: its fields, the engine they load, and the prompts they shape."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_messages
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.llms.llm import LLM, default_completion_to_prompt
from llama_index.core.prompts import PromptTemplate

from kvpacket_rag import GenerationSettings, KVPacketEngine, KVPacketError, PromptError
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.engine import Policy
from kvpacket_rag.reading import Match, OnMiss
from llama_index_kvpacket.loading import (
    DEFAULT_MODEL,
    as_text,
    from_anywhere,
    is_reloadable,
    load,
    require_no_loading,
    require_objects,
    resolve,
    window,
)
from llama_index_kvpacket.messages import to_message, with_system_prompt
from llama_index_kvpacket.parameters import DECODING, generation_settings, require_engine, require_known, require_names
from llama_index_kvpacket.request import Prompt
from llama_index_kvpacket.responses import Raw
from llama_index_kvpacket.retrieved import RETRIEVED

_IDENTITY = "{query_str}"
_KEPT_USAGES = 1000

logger = logging.getLogger(__name__)


class ConfiguredLLM(LLM):
    """The fields of :class:`~llama_index_kvpacket.KVPacketLLM`, without its methods that answer."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model_name: str = Field(default=DEFAULT_MODEL, description="Short name, path or hub name of the model.")
    tokenizer_name: str | None = Field(default=None, description="The same of the tokenizer, if it is not the model's.")
    context_window: int = Field(default=0, description="Tokens of prompt and answer together; 0 for the model's own.")
    max_new_tokens: int = Field(default=256, description="Most tokens of an answer.", gt=0)
    temperature: float = Field(default=0.0, description="0 takes the most likely token each time.", ge=0)
    top_p: float = Field(default=1.0, description="Smallest set of tokens with this much probability.")
    top_k: int = Field(default=0, description="This many most likely tokens; 0 for all.")
    min_p: float = Field(default=0.0, description="Least share of the best token's probability.")
    repetition_penalty: float = Field(default=1.0, description="Divides the logits of tokens that occurred.")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer and are cut from it.")
    stopping_ids: list[int] = Field(default_factory=list, description="Tokens that do; an ordinary one by its text.")
    seed: int | None = Field(default=None, description="Of the draw; None for a new one each time.")
    generate_kwargs: dict[str, Any] = Field(default_factory=dict, description="Decoding fields by transformers' names.")
    is_chat_model: bool | None = Field(
        default=None,
        description="Whether prompts are chats; None if the tokenizer has a chat template and neither "
        "completion_to_prompt nor query_wrapper_prompt shapes prompts in its place.",
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Handed to the chat template.")
    match: Match = Field(
        default="auto", description="'auto' looks for every known chunk, 'hints' for retrieved ones, 'off' for none."
    )
    on_miss: OnMiss = Field(default="prefill", description="What a miss does; see kvpacket_rag.Reuse.")
    encode_retrieved: bool = Field(
        default=True,
        description="Give chunks that a retriever found, and that have no packet, one when a prompt first holds them; "
        "not with on_miss='error', and not in a folder, where it would outlive its document: see KVPacketTransform.",
    )
    policy: Policy = Field(
        default="packets", description="'prefill' reads every prompt in full, to compare; 'auto' takes the quicker way."
    )
    device_map: str = Field(default="auto", description="Where the model runs, such as 'cuda' or 'cpu'.")
    dtype: str = Field(default="auto", description="Number format it computes in, such as 'bfloat16'.")
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,  # it may hold a token of the hub
        description="Of a model loaded by name: dtype, torch_dtype, device_map, cache_dir, token, revision, subfolder, "
        "local_files_only, variant and attn_implementation (sdpa or eager) count, low_cpu_mem_usage, "
        "trust_remote_code, use_cache and use_safetensors make no difference, others are refused. No effect with "
        "model=.",
    )
    tokenizer_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Of a tokenizer loaded by name: cache_dir, token, revision, subfolder and local_files_only count, "
        "and the model's own tokenizer takes those of model_kwargs where they are left out; lengths and sides make no "
        "difference, for prompts are neither padded nor cut; others are refused. No effect with tokenizer=.",
    )
    tokenizer_outputs_to_remove: list[str] = Field(
        default_factory=list, description="No effect: the model is given token ids and nothing else."
    )
    min_match_tokens: int = Field(
        default=MIN_MATCH_TOKENS, description="Shorter chunks are not looked for in a prompt."
    )
    store: str | None = Field(default=None, description="Folder of the packets; None for memory.")
    adapter: str | None = Field(
        default="auto", description="File of the adapter; 'auto' for the one that ships, None for bare chunks."
    )

    _engine: KVPacketEngine = PrivateAttr()
    _can_reload: bool = PrivateAttr(default=True)
    _hints: tuple[str, ...] = PrivateAttr(default=())
    _usages: list[Raw] = PrivateAttr(default_factory=list)  # of the last calls; only hinted copies share them
    _last: list[tuple[Raw, int]] = PrivateAttr(default_factory=list)  # of the last one, once it is over; shared too
    _warnings: list[str] = PrivateAttr(default_factory=list)  # that were given

    def __init__(
        self,
        model_name: str | None = None,
        *,
        engine: KVPacketEngine | None = None,
        model: Any = None,
        tokenizer: Any = None,
        **fields: Any,
    ) -> None:
        require_known(type(self).__name__, fields, {*type(self).model_fields, "engine", "model", "tokenizer", "device"})
        require_objects({**fields, "model": model, "tokenizer": tokenizer})
        given = {name: value for name, value in fields.items() if value is not None or name == "adapter"}
        given = resolve(given, engine is not None or model is not None, engine is not None or tokenizer is not None)
        if engine is not None:
            require_engine(type(self).__name__, engine)
            require_no_loading(engine, model_name, {**given, "model": model, "tokenizer": tokenizer})
        name = engine.model_name if engine else model_name or getattr(model, "name_or_path", "") or DEFAULT_MODEL
        if engine is None and model is None:
            name, given["tokenizer_name"] = from_anywhere(name, given.get("tokenizer_name"))
        shown: dict[str, Any] = {**given, "model_name": name}
        shown |= {key: as_text(given[key]) for key in ("store", "adapter") if key in given}
        super().__init__(**shown)
        self._can_reload = engine is None and model is None and tokenizer is None and is_reloadable(given)
        self._engine = engine or load(name, given, model, tokenizer)
        RETRIEVED.listen()
        self.context_window = window(self._engine, self.context_window, self.max_new_tokens)
        self.generation_settings({})

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("query_wrapper_prompt", mode="before")
    @classmethod
    def _as_template(cls, prompt: Any) -> Any:
        return PromptTemplate(prompt) if isinstance(prompt, str) else prompt

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketLLM"

    @property
    def engine(self) -> KVPacketEngine:
        """The engine, to share with a vector store; a copy of this object keeps it, and counts its own usage."""
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=self._is_chat(),
            model_name=self.model_name,
        )

    @property
    def last_usage(self) -> Raw | None:
        """``raw["usage"]`` of the call that finished last, in whichever thread: query engines do not hand it on.

        None while the next is on its way, and if that one is given up: a stream counts when it was read to its end. A
        query engine that streams asks the model when its answer is read; so it is None, too, from the moment in which
        the thread or task at hand retrieves again.
        """
        return self._last[-1][0] if self._last and RETRIEVED.here().number <= self._last[-1][1] else None

    @property
    def usages(self) -> list[Raw]:
        """The same of the last 1000 calls, oldest first. One answer may take several; clear the list before it."""
        return self._usages

    def begin(self) -> None:
        """A call is on its way."""
        self._last.clear()

    def note(self, usage: Raw, retrieved: int) -> None:
        """A call has finished, with this usage, before which there had been so many retrievals."""
        self._last[:] = [(usage, retrieved)]
        self._usages.append(usage)
        del self._usages[:-_KEPT_USAGES]

    def warn_once(self, warning: str) -> None:
        """Log a warning, if it is the first one of this object and its copies; ``on_miss="warn"`` logs every miss."""
        if not self._warnings:
            self._warnings.append(warning)
            logger.warning("%s", warning)

    @property
    def hints(self) -> tuple[str, ...]:
        """Packet ids of chunks that every prompt of this object is said to hold."""
        return self._hints

    def hinted(self, packet_ids: Iterable[str]) -> Self:
        """A light copy for prompts that hold these chunks; it shares engine, callbacks and ``last_usage``.

        A chunk that is not found in a prompt as it was encoded is then a miss. With ``match="hints"`` no other chunk
        is looked for; without hints those that retrievers found lately are.
        """
        copy = self.model_copy()
        copy._usages, copy._last = self._usages, self._last
        copy._hints = tuple(dict.fromkeys(require_names("packet_ids", packet_ids)))
        return copy

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text by the model's own tokenizer.

        ``Settings.tokenizer = llm.token_ids`` makes LlamaIndex split and pack text by what the model really reads.
        """
        return self._engine.token_ids(text)

    def generation_settings(self, call: Mapping[str, Any]) -> GenerationSettings:
        """How a call with these arguments decodes."""
        own = {name: getattr(self, name) for name in DECODING}
        return generation_settings(self._engine.backbone, self.stopping_ids, own, self.generate_kwargs, call)

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """A chat as the engine takes it."""
        messages = with_system_prompt(self.system_prompt, messages)
        if self.messages_to_prompt is not None and self.messages_to_prompt is not plain_messages:
            return self.messages_to_prompt(messages)
        return [to_message(message) for message in messages]

    def text_prompt(self, prompt: str, formatted: bool) -> Prompt:
        """A text as the engine takes it; see ``complete``."""
        if not isinstance(prompt, str):
            raise PromptError(f"the prompt is a {type(prompt).__name__}; pass a string, or messages to chat()")
        if formatted:
            return prompt
        if self._is_chat() and not self._has_own_shape():
            return self.chat_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])
        return self._shaped(prompt)

    def _shaped(self, prompt: str) -> str:
        """A text in the user's own shape, as HuggingFaceLLM has it: wrapped, then led by the system prompt."""
        if self.query_wrapper_prompt is not None:
            prompt = self.query_wrapper_prompt.format(query_str=prompt)
        prompt = (self.completion_to_prompt or default_completion_to_prompt)(prompt)
        return f"{self.system_prompt} {prompt}" if self.system_prompt else prompt

    def _is_chat(self) -> bool:
        if self.is_chat_model is not None:
            return self.is_chat_model
        return self._engine.has_chat_template and not self._has_own_shape()

    def _has_own_shape(self) -> bool:
        wrapper = self.query_wrapper_prompt
        wraps = wrapper is not None and wrapper.get_template() != _IDENTITY
        return wraps or self.completion_to_prompt not in (None, default_completion_to_prompt)

    def __copy__(self) -> Self:
        copy = super().__copy__()
        copy._usages, copy._last = [], []
        return copy

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self._engine)] = self._engine
        copy = super().__deepcopy__(memo)
        copy._usages, copy._last = [], []
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._can_reload:
            raise KVPacketError(
                f"a {type(self).__name__} made from an engine, a model, a tokenizer, a store or an adapter object "
                "cannot be pickled, for another process could not load them again; make it from model_name, and store "
                "and adapter as paths"
            )
        kept = type(self).model_fields.keys() - {"callback_manager", "rate_limiter"}
        return _rebuild, (type(self), {name: getattr(self, name) for name in kept}, self._hints)


def _rebuild(kind: type[ConfiguredLLM], fields: dict[str, Any], hints: tuple[str, ...]) -> ConfiguredLLM:
    llm = kind(**fields)
    llm._hints = hints
    return llm
