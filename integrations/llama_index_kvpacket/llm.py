"""KVPacketLLM: LlamaIndex's language model interface on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_messages
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from kvpacket_rag import Answer, AnswerStream, GenerationSettings, KVPacketEngine, KVPacketError, Message
from kvpacket_rag.engine import Policy
from llama_index_kvpacket.loading import DEFAULT_MODEL, as_text, is_reloadable, load, require_no_loading, window
from llama_index_kvpacket.messages import to_message, with_system_prompt
from llama_index_kvpacket.parameters import DECODING, generation_settings, require_known
from llama_index_kvpacket.responses import (
    Raw,
    SharedStream,
    aclosing,
    aresponses,
    chat_response,
    closing,
    completion_response,
    raw,
    responses,
)

Prompt = str | list[Message]


class KVPacketLLM(LLM):
    """A language model that reads no chunk it has a packet of.

    Chunks that the engine's store knows are found in whatever prompt LlamaIndex builds, so query
    engines, chat engines and agents need no change. Every response tells in ``raw["usage"]`` how
    many tokens came from packets. A call may override the decoding fields by name (``max_tokens``
    is another word for ``max_new_tokens``), ``chat_template_kwargs`` and ``policy``; other names are refused.

    Args:
        model_name: short name, path or hub name of the model to load; see ``KVPacketEngine.load``.
        engine: an engine that is loaded already, in place of the above and of the loading fields.
        fields: any field of this class; ``device`` is another word for ``device_map``.

    Raises:
        KVPacketError: an unknown argument, or two that contradict each other.

    Example:
        >>> store = KVPacketVectorStore(engine, "library")                               # doctest: +SKIP
        >>> index = VectorStoreIndex.from_vector_store(store, embed_model=embed_model)   # doctest: +SKIP
        >>> index.as_query_engine(llm=KVPacketLLM(engine=engine)).query("Who signed?")   # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model_name: str = Field(default=DEFAULT_MODEL, description="Short name, path or hub name of the model.")
    context_window: int = Field(default=0, description="Tokens of prompt and answer together; 0 for the model's own.")
    max_new_tokens: int = Field(default=256, description="Most tokens of an answer.", gt=0)
    temperature: float = Field(default=0.0, description="0 takes the most likely token each time.", ge=0)
    top_p: float = Field(default=1.0, description="Smallest set of tokens with this much probability.")
    top_k: int = Field(default=0, description="This many most likely tokens; 0 for all.")
    min_p: float = Field(default=0.0, description="Least share of the best token's probability.")
    repetition_penalty: float = Field(default=1.0, description="Divides the logits of tokens that occurred.")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer and are cut from it.")
    seed: int | None = Field(default=None, description="Of the draw; None for a new one each time.")
    generate_kwargs: dict[str, Any] = Field(default_factory=dict, description="Decoding fields by transformers' names.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Handed to the chat template.")
    policy: Policy = Field(default="packets", description="'prefill' reads every prompt in full, to compare.")
    device_map: str = Field(default="auto", description="Where the model runs, such as 'cuda' or 'cpu'.")
    dtype: str = Field(default="auto", description="Number format it computes in, such as 'bfloat16'.")
    min_match_tokens: int = Field(default=16, description="Shorter chunks are not looked for in a prompt.")
    store: str | None = Field(default=None, description="Folder of the packets; None for memory.")
    adapter: str | None = Field(default=None, description="File of the adapter; None for bare chunks.")

    _engine: KVPacketEngine = PrivateAttr()
    _can_reload: bool = PrivateAttr(default=True)
    _last_usage: Raw | None = PrivateAttr(default=None)

    def __init__(self, model_name: str | None = None, *, engine: KVPacketEngine | None = None, **fields: Any) -> None:
        if "device" in fields:
            fields.setdefault("device_map", fields.pop("device"))
        require_known(type(self).__name__, fields, {*type(self).model_fields, "engine"})
        if engine is not None:
            require_no_loading(engine, model_name, fields)
        name = engine.model_name if engine else model_name or DEFAULT_MODEL
        shown = {**fields, "model_name": name, "dtype": str(fields.get("dtype") or "auto").removeprefix("torch.")}
        shown |= {key: as_text(fields[key]) for key in ("store", "adapter") if key in fields}
        super().__init__(**shown)
        self._settings({})
        self._can_reload = engine is None and is_reloadable(fields)
        self._engine = engine or load(name, fields)
        self.context_window = window(self._engine, self.context_window, self.max_new_tokens)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketLLM"

    @property
    def engine(self) -> KVPacketEngine:
        """The engine, to share with a vector store; a copy of this object keeps the same one."""
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=self._engine.has_chat_template,
            model_name=self.model_name,
        )

    @property
    def last_usage(self) -> Raw | None:
        """``raw["usage"]`` of the call that finished last, in whichever thread: query engines do not hand it on."""
        return self._last_usage

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text by the model's own tokenizer.

        ``Settings.tokenizer = llm.token_ids`` makes LlamaIndex split and pack text by what the model really reads.
        """
        return self._engine.token_ids(text)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        answer = self._begin(lambda: self._chat_prompt(messages), kwargs).read_all()
        return chat_response(answer.text, None, self._finish(answer))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, as one message of a user or, if ``formatted``, as the final prompt that it is."""
        answer = self._begin(lambda: self._text_prompt(prompt, formatted), kwargs).read_all()
        return completion_response(answer.text, None, self._finish(answer))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat piece by piece; the last response has no text of its own, but the usage."""
        stream = self._begin(lambda: self._chat_prompt(messages), kwargs)

        @llm_chat_callback()
        def events(llm: KVPacketLLM, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
            return responses(stream.start(), chat_response, llm._finish)

        return closing(events(self, messages, **kwargs), stream)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a text piece by piece; see :meth:`complete` and :meth:`stream_chat`."""
        stream = self._begin(lambda: self._text_prompt(prompt, formatted), kwargs)

        @llm_completion_callback()
        def events(llm: KVPacketLLM, prompt: str, **kwargs: Any) -> CompletionResponseGen:
            return responses(stream.start(), completion_response, llm._finish)

        return closing(events(self, prompt, **kwargs), stream)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """:meth:`chat`, computed in a worker thread; cancelling it stops the model at the next token."""
        answer = await self._aread(self._begin(lambda: self._chat_prompt(messages), kwargs))
        return chat_response(answer.text, None, self._finish(answer))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """:meth:`complete`, computed in a worker thread; cancelling it stops the model at the next token."""
        answer = await self._aread(self._begin(lambda: self._text_prompt(prompt, formatted), kwargs))
        return completion_response(answer.text, None, self._finish(answer))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """:meth:`stream_chat`, each piece computed in a worker thread."""
        stream = self._begin(lambda: self._chat_prompt(messages), kwargs)

        @llm_chat_callback()
        async def events(llm: KVPacketLLM, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
            await asyncio.to_thread(stream.start)
            return aresponses(stream, chat_response, llm._finish)

        return aclosing(await events(self, messages, **kwargs), stream)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """:meth:`stream_complete`, each piece computed in a worker thread."""
        stream = self._begin(lambda: self._text_prompt(prompt, formatted), kwargs)

        @llm_completion_callback()
        async def events(llm: KVPacketLLM, prompt: str, **kwargs: Any) -> CompletionResponseAsyncGen:
            await asyncio.to_thread(stream.start)
            return aresponses(stream, completion_response, llm._finish)

        return aclosing(await events(self, prompt, **kwargs), stream)

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        messages = with_system_prompt(self.system_prompt, messages)
        if self.messages_to_prompt is not None and self.messages_to_prompt is not plain_messages:
            return self.messages_to_prompt(messages)
        return [to_message(message) for message in messages]

    def _text_prompt(self, prompt: str, formatted: bool) -> Prompt:
        if formatted:
            return prompt
        shape = self.completion_to_prompt or default_completion_to_prompt
        own_shape = self.query_wrapper_prompt is not None or shape is not default_completion_to_prompt
        if self._engine.has_chat_template and not own_shape:
            return self._chat_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])
        return self._extend_prompt(shape(prompt))

    def _begin(self, prompt: Callable[[], Prompt], kwargs: Mapping[str, Any]) -> SharedStream:
        """The one way to the engine; nothing happens, and no error is raised, before it is started."""

        def begin() -> AnswerStream:
            call = dict(kwargs)
            template = {**self.chat_template_kwargs, **(call.pop("chat_template_kwargs", None) or {})}
            policy = call.pop("policy", None) or self.policy
            return self._engine.stream(prompt(), self._settings(call), policy=policy, template_kwargs=template)

        return SharedStream(begin)

    def _settings(self, call: Mapping[str, Any]) -> GenerationSettings:
        own = {name: getattr(self, name) for name in DECODING}
        return generation_settings(own, self.generate_kwargs, call)

    async def _aread(self, stream: SharedStream) -> Answer:
        try:
            return await asyncio.to_thread(stream.read_all)
        finally:
            stream.close()

    def _finish(self, answer: Answer) -> Raw:
        details = raw(answer)
        self._last_usage = details["usage"]
        return details

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVPacketLLM:
        memo = {} if memo is None else memo
        memo[id(self._engine)] = self._engine
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._can_reload:
            raise KVPacketError(
                f"a {type(self).__name__} made from an engine, a store or an adapter object cannot be pickled, for "
                "another process could not load them again; make it from model_name, and store and adapter as paths"
            )
        kept = type(self).model_fields.keys() - {"callback_manager", "rate_limiter"}
        return _rebuild, (type(self), {name: getattr(self, name) for name in kept})


def _rebuild(kind: type[KVPacketLLM], fields: dict[str, Any]) -> KVPacketLLM:
    return kind(**fields)
