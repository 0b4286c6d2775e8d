"""A LangChain chat model that answers from packets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables.config import run_in_executor
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, model_validator

from kvpacket_rag import Answer, __version__
from langchain_kvpacket.messages import to_messages
from langchain_kvpacket.options import NO_TOOLS, EngineFields, answer_facts


class ChatKVPacket(EngineFields, BaseChatModel):
    """Chat model that takes the text it knows from packets and reads only the rest.

    Every chunk that the engine's store knows is found in the messages, wherever it stands, and is
    not read again. Put chunks there with :class:`KVPacketVectorStore`.

    Setup:
        ``pip install "kvpacket-rag[langchain]"``. The model runs in this process; there is no key.

    Key init args — completion params:
        max_tokens: most tokens of an answer.
        temperature, top_p, top_k, min_p, repetition_penalty, seed: of decoding; greedy by default.
        stop: texts at which an answer ends.
        chat_template_kwargs: such as ``{"enable_thinking": False}``.

    Key init args — engine params:
        model: short name, path or hub name.
        store: folder of the packets.
        adapter, device, dtype, min_match_tokens, policy: see the fields.
        engine: one that is there already, in place of these; or use :meth:`from_engine`.

    Instantiate:
        >>> chat = ChatKVPacket(model="smollm2-135m-instruct", store="library", max_tokens=64)

    Invoke:
        >>> chat.invoke([("system", "Answer briefly."), ("human", f"{chunk}\\n\\nWho signed it?")]).content
        ... # doctest: +SKIP

    Stream:
        >>> for chunk in chat.stream("Who signed it?"):  # doctest: +SKIP
        ...     print(chunk.text, end="")

    Async:
        >>> await chat.ainvoke("Who signed it?")  # doctest: +SKIP

    Token usage:
        ``usage_metadata["input_token_details"]["cache_read"]`` counts the tokens taken from packets.

    Response metadata:
        ``response_metadata`` has chunks_reused, packet_tokens, prefilled_tokens, misses (with reasons),
        timings (seconds), finish_reason and model_name.
    """

    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)

    streaming: bool = False
    """Generate by streaming also where a whole answer is asked for, so that callbacks get each piece."""

    @model_validator(mode="after")
    def _set_kvpacket_version(self) -> Self:
        self._add_version("kvpacket-rag", __version__)
        return self

    @property
    def _llm_type(self) -> str:
        return "kvpacket-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._trace(super()._get_ls_params(stop, **kwargs), stop)

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(text_inputs=True, text_outputs=True, image_inputs=False, tool_calling=False)
        if engine := self.shared_engine.loaded:
            profile["max_input_tokens"] = engine.context_window
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Tokens of a text by the model's own tokenizer."""
        return self.custom_get_token_ids(text) if self.custom_get_token_ids else self.engine.token_ids(text)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: always; it says what to do instead.
        """
        raise NotImplementedError(NO_TOOLS)

    def generate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """As in the base class; the engine is loaded first, for the key of the answer cache needs it."""
        self.shared_engine.get()
        return super().generate(*args, **kwargs)

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """As :meth:`generate`; the engine is loaded in another thread."""
        await run_in_executor(None, self.shared_engine.get)
        return await super().agenerate(*args, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self._call(stop, kwargs).stream(self.engine, to_messages(messages)).read_all()
        message = AIMessage(answer.text, usage_metadata=_usage(answer), response_metadata=self._facts(answer))
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Token by token, so that a task that is cancelled stops the model too.
        return await agenerate_from_stream(self._astream(messages, stop, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        stream = self._call(stop, kwargs).stream(self.engine, to_messages(messages))
        try:
            for piece in stream:
                yield _reported(AIMessageChunk(content=piece), run_manager)
            answer = stream.answer
        finally:
            stream.close()
        last = AIMessageChunk(
            content="",
            usage_metadata=_usage(answer),
            response_metadata=self._facts(answer),
            chunk_position="last",
        )
        yield _reported(last, run_manager)

    def _facts(self, answer: Answer) -> dict[str, Any]:
        return answer_facts(self.model, answer)


def _reported(message: AIMessageChunk, run_manager: CallbackManagerForLLMRun | None) -> ChatGenerationChunk:
    chunk = ChatGenerationChunk(message=message)
    if run_manager is not None:
        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
    return chunk


def _usage(answer: Answer) -> UsageMetadata:
    usage = answer.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.packet_tokens),
    )
