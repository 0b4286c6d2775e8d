"""KVPacketLLM: LlamaIndex's language model interface on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from llama_index_kvpacket.request import Prompt, Request
from llama_index_kvpacket.responses import (
    SharedStream,
    aclosing,
    aresponses,
    chat_response,
    closing,
    completion_response,
    responses,
)
from llama_index_kvpacket.structured import StructuredAnswers


class KVPacketLLM(StructuredAnswers):
    """A language model that reads no chunk it has a packet of.

    Chunks that the engine's store knows are found in whatever prompt LlamaIndex builds, so query
    engines, chat engines and agents need no change. What a retriever of any index found, and has no
    packet, gets one when a prompt first holds it. Every response tells in ``raw["usage"]`` how many
    tokens came from packets, and which chunks did not and why; a log line of level INFO says the same.
    Query and chat engines keep a response's ``raw`` to themselves: ask ``last_usage`` after their answer, after the
    end of a stream, or ``usages`` where an answer takes several calls. Where nothing could be reused of what was
    retrieved, the first such call is warned of.

    It takes the arguments of LlamaIndex's ``HuggingFaceLLM``; the descriptions of the fields say where
    one makes no difference here, and what cannot have its effect is refused. ``query_wrapper_prompt``
    and ``completion_to_prompt`` shape completions, ``messages_to_prompt`` chats, as they do there. Unlike there,
    ``complete(prompt)`` puts a text that nothing shapes into the model's chat template, so that an instruction model
    answers it; ``formatted=True`` reads one prompt as it stands, ``is_chat_model=False`` all of them.

    A call may override the decoding fields by name (``max_tokens`` is another word for
    ``max_new_tokens``), ``match``, ``on_miss``, ``policy`` and ``chat_template_kwargs``, and name the packets of the
    chunks in its prompt as ``hints``; other names are refused.

    Args:
        model_name: short name, path or hub name of the model to load; see ``KVPacketEngine.load``.
        engine: an engine that is loaded already, in place of the above and of the loading fields.
        model: a transformers model that is loaded already; ``model_name`` is only what it is called then.
        tokenizer: of the model, if it is not the one of its name.
        fields: any field of this class; ``device`` is another word for ``device_map``. ``store`` may be a
            packet store and ``adapter`` an adapter.

    Raises:
        KVPacketError: an unknown argument, one that cannot have its effect, or two that contradict each other.

    Example:
        >>> store = KVPacketVectorStore(engine, "library")                               # doctest: +SKIP
        >>> index = VectorStoreIndex.from_vector_store(store, embed_model=embed_model)   # doctest: +SKIP
        >>> index.as_query_engine(llm=KVPacketLLM(engine=engine)).query("Who signed?")   # doctest: +SKIP
    """

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        stream = self._begin(lambda: self.chat_prompt(messages), kwargs)
        return chat_response(stream.read_all().text, None, stream.details())

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text, as one message of a user or, if ``formatted``, as the final prompt that it is."""
        stream = self._begin(lambda: self.text_prompt(prompt, formatted), kwargs)
        return completion_response(stream.read_all().text, None, stream.details())

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat piece by piece; the last response has no text of its own, but the usage."""
        stream = self._begin(lambda: self.chat_prompt(messages), kwargs)

        @llm_chat_callback()
        def events(llm: KVPacketLLM, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
            return responses(stream.start(), chat_response)

        return closing(lambda: events(self, messages, **kwargs), stream)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a text piece by piece; see :meth:`complete` and :meth:`stream_chat`."""
        stream = self._begin(lambda: self.text_prompt(prompt, formatted), kwargs)

        @llm_completion_callback()
        def events(llm: KVPacketLLM, prompt: str, **kwargs: Any) -> CompletionResponseGen:
            return responses(stream.start(), completion_response)

        return closing(lambda: events(self, prompt, **kwargs), stream)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """:meth:`chat`, computed in a worker thread; cancelling it stops the model at the next token."""
        stream = self._begin(lambda: self.chat_prompt(messages), kwargs)
        return chat_response(await _read_all(stream), None, stream.details())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """:meth:`complete`, computed in a worker thread; cancelling it stops the model at the next token."""
        stream = self._begin(lambda: self.text_prompt(prompt, formatted), kwargs)
        return completion_response(await _read_all(stream), None, stream.details())

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """:meth:`stream_chat`, each piece computed in a worker thread."""
        stream = self._begin(lambda: self.chat_prompt(messages), kwargs)

        @llm_chat_callback()
        async def events(llm: KVPacketLLM, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
            await asyncio.to_thread(stream.start)
            return aresponses(stream, chat_response)

        return await aclosing(lambda: events(self, messages, **kwargs), stream)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """:meth:`stream_complete`, each piece computed in a worker thread."""
        stream = self._begin(lambda: self.text_prompt(prompt, formatted), kwargs)

        @llm_completion_callback()
        async def events(llm: KVPacketLLM, prompt: str, **kwargs: Any) -> CompletionResponseAsyncGen:
            await asyncio.to_thread(stream.start)
            return aresponses(stream, completion_response)

        return await aclosing(lambda: events(self, prompt, **kwargs), stream)

    def _begin(self, prompt: Callable[[], Prompt], arguments: Mapping[str, Any]) -> SharedStream:
        request = Request(self, prompt, arguments)
        return SharedStream(request.start, request.details)


async def _read_all(stream: SharedStream) -> str:
    try:
        return (await asyncio.to_thread(stream.read_all)).text
    finally:
        stream.close()
