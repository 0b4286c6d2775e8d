"""A LangChain chat model that answers from packets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolCall, ToolCallChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict

from kvpacket_rag import Answer, AnswerStream, PromptError
from langchain_kvpacket.call import answer_facts
from langchain_kvpacket.messages import to_messages
from langchain_kvpacket.options import EngineFields
from langchain_kvpacket.tools import CallSyntax, Tool, to_tools


class ChatKVPacket(EngineFields, BaseChatModel):
    """Chat model that takes the text it knows from packets and reads only the rest.

    Every chunk that the engine's store knows is found in the messages, wherever it stands, and is
    not read again. Put chunks there with :class:`KVPacketVectorStore` or :class:`KVPacketRetriever`.
    Code written for a local ``ChatHuggingFace`` runs with this class in its place.

    Setup:
        ``pip install "kvpacket-rag[langchain]"``. The model runs in this process; there is no key.

    Key init args — completion params:
        max_tokens: most tokens of an answer.
        temperature, top_p, top_k, min_p, repetition_penalty, seed: of decoding; greedy by default.
        stop: texts at which an answer ends.
        chat_template_kwargs: such as ``{"enable_thinking": False}``.
        match, on_miss: which chunks are looked for, and what a miss does.

    Key init args — engine params:
        model: short name, path or hub name.
        store: folder of the packets.
        adapter, device, dtype, min_match_tokens, policy: see the fields.
        engine: one that is there already, in place of these; or use :meth:`from_engine`.
        llm: a :class:`KVPacketLLM` to share engine and settings with.

    Instantiate:
        >>> chat = ChatKVPacket(model="smollm2-135m-instruct", store="library", max_tokens=64)

    Invoke:
        >>> chat.invoke([("system", "Answer briefly."), ("human", f"{chunk}\\n\\nWho signed it?")]).content
        ... # doctest: +SKIP

        A call may have settings of its own, and say what was retrieved: ``kv_hint`` takes Documents or
        packet ids. A hinted chunk that is not reused is among the misses, with the reason.

        >>> chat.invoke(messages, kv_hint=documents, on_miss="error", max_tokens=8)  # doctest: +SKIP

    Stream:
        >>> for chunk in chat.stream("Who signed it?"):  # doctest: +SKIP
        ...     print(chunk.text, end="")

    Async:
        >>> await chat.ainvoke("Who signed it?")  # doctest: +SKIP

    Tool calling:
        By models whose chat template takes tools, in the form their template writes calls; others say so in an
        error, and so does whatever needs a call to be forced, such as structured output.

        >>> chat.bind_tools([search]).invoke("Who signed the lease?").tool_calls  # doctest: +SKIP

    Token usage:
        ``usage_metadata["input_token_details"]["cache_read"]`` counts the tokens taken from packets.

        >>> chat.invoke(messages).usage_metadata  # doctest: +SKIP
        {'input_tokens': 179, 'output_tokens': 19, 'total_tokens': 198, 'input_token_details': {'cache_read': 47}}

    Response metadata:
        ``response_metadata`` has chunks_reused, packet_tokens, preamble_tokens, prefilled_tokens, misses (with
        reasons), timings (seconds), finish_reason and model_name. ``chat.last_usage`` tells of the answer that was
        finished last.
    """

    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)

    streaming: bool = False
    """Generate by streaming also where a whole answer is asked for, so that callbacks get each piece."""

    @property
    def _llm_type(self) -> str:
        return "kvpacket-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(text_inputs=True, text_outputs=True, image_inputs=False, structured_output=False)
        if engine := self.shared_engine.loaded:
            profile["max_input_tokens"] = engine.context_window
        return profile

    def bind_tools(
        self, tools: Sequence[Tool], *, tool_choice: str | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools it may call.

        Args:
            tools: functions, classes, LangChain tools or OpenAI's form of them.
            tool_choice: None or "auto" leaves it to the model, "none" withholds the tools.
            kwargs: of each call, as :meth:`invoke` takes them.

        Raises:
            NotImplementedError: the model's chat template shows no tools, or the choice forces a call. An
                engine that is not loaded yet says so with its first call, as a PromptError.
        """
        bound = to_tools(tools, tool_choice)
        if bound and (engine := self.shared_engine.loaded):
            try:
                CallSyntax.of(engine, {**(self.chat_template_kwargs or {}), "tools": bound})
            except PromptError as error:
                raise NotImplementedError(str(error)) from error
        return self.bind(tools=bound, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stream, syntax = self._begin(messages, stop, kwargs)
        answer = stream.read_all()
        text, calls = syntax.read(answer.text) if syntax else (answer.text, [])
        facts = answer_facts(self.model, answer)
        message = AIMessage(text, tool_calls=calls, usage_metadata=_usage(answer), response_metadata=facts)
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
        stream, syntax = self._begin(messages, stop, kwargs)
        told = ""
        try:
            for piece in _certain(stream, syntax):
                told += piece
                yield _reported(AIMessageChunk(content=piece), run_manager)
            answer = stream.answer
        finally:
            stream.close()
        text, calls = syntax.read(answer.text) if syntax else (answer.text, [])
        last = AIMessageChunk(
            content=text[len(told) :],
            tool_call_chunks=[_chunk(call, number) for number, call in enumerate(calls)],
            usage_metadata=_usage(answer),
            response_metadata=answer_facts(self.model, answer),
            chunk_position="last",
        )
        yield _reported(last, run_manager)

    def _begin(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[AnswerStream, CallSyntax | None]:
        """An answer on its way, and how calls are written in it, if there are tools to call."""
        own = {name: value for name, value in kwargs.items() if name not in ("tools", "tool_choice")}
        tools = to_tools(kwargs.get("tools") or (), kwargs.get("tool_choice"))
        call, syntax = self._call(stop, own), None
        if tools:
            call = replace(call, template_kwargs={**call.template_kwargs, "tools": tools})
            syntax = CallSyntax.of(self.engine, call.template_kwargs)
        return self._start(call, to_messages(messages)), syntax


def _certain(stream: AnswerStream, syntax: CallSyntax | None) -> Iterator[str]:
    """The pieces of an answer, held back where they may belong to a call."""
    if syntax is None:
        yield from stream
        return
    read = told = ""
    for piece in stream:
        read += piece
        certain = syntax.certain(read)
        if new := certain[len(told) :]:
            told = certain
            yield new


def _chunk(call: ToolCall, number: int) -> ToolCallChunk:
    arguments = json.dumps(call["args"], ensure_ascii=False)
    return tool_call_chunk(name=call["name"], args=arguments, id=call["id"], index=number)


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
        input_token_details=InputTokenDetails(cache_read=usage.packet_tokens + usage.preamble_tokens),
    )
