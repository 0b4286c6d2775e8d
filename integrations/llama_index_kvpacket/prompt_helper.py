"""BoundaryPromptHelper: packs retrieved chunks into prompts whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.node_parser.text.token import TokenTextSplitter
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from kvpacket_rag import ContextTooLongError, KVPacketError
from kvpacket_rag.chat import fit_roles, renderer
from llama_index_kvpacket.configuration import ConfiguredLLM

logger = logging.getLogger(__name__)

SEPARATOR = "\n\n"
_BORDER_TOKENS = 4  # separator, and what it costs to tokenise a chunk apart from the text around it


class Packed(str):
    """Chunks joined to one text, which remembers where one ends and the next begins."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, parts: Iterable[str]) -> Packed:
        """Join chunks."""
        chunks = tuple(parts)
        packed = cls(SEPARATOR.join(chunks))
        packed.parts = chunks
        return packed


def parts_of(text: str) -> tuple[str, ...]:
    """The chunks of a text, if it remembers them; else itself."""
    parts: tuple[str, ...] = getattr(text, "parts", (text,))
    return parts


class _Shown(list[str]):
    """Texts that a prompt shows as they are; ``simple_summarize`` puts a list into its prompt, not a text."""

    def __str__(self) -> str:
        return SEPARATOR.join(self)


class BoundaryPromptHelper(PromptHelper):
    """A prompt helper that cuts prompts at the borders of chunks, so that each chunk can come from its packet.

    It counts what the model really reads: its own tokens, its chat template, the soft tokens of an adapter. Room for an
    answer that is to be refined is left as far as answers can get, which is ``num_output``. Only a chunk that
    fits into no prompt is cut, with a warning.

    ``Settings.prompt_helper = BoundaryPromptHelper.from_llm(llm)`` makes every response mode and chat engine use it.
    """

    _llm: ConfiguredLLM | None = PrivateAttr(default=None)

    @classmethod
    def from_llm(cls, llm: LLM, chunk_size_limit: int | None = None) -> Self:
        """For the window and the tokenizer of a model.

        Args:
            llm: a ``KVPacketLLM``, or a structured one around it.
            chunk_size_limit: most tokens of retrieved text in a prompt; None for as many as fit.

        Raises:
            KVPacketError: it is another model.
        """
        reader = _reader(llm)
        if reader is None:
            raise KVPacketError(f"BoundaryPromptHelper needs a KVPacketLLM, and got a {type(llm).__name__}")
        made = cls.from_llm_metadata(reader.metadata, chunk_size_limit=chunk_size_limit, tokenizer=reader.token_ids)
        helper = cast(Self, made)
        helper._llm = reader
        return helper

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialised settings."""
        return "KVPacketBoundaryPromptHelper"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._llm, self.model_dump())

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """As few texts as possible, each of whole chunks and short enough for the prompt.

        Args:
            prompt: filled in as far as it is known.
            text_chunks: chunks, or texts that this method packed.
            padding: tokens to leave free for what is still to be filled in.
            llm: reads the prompt.
            tools: that are described in it.

        Raises:
            ContextTooLongError: the prompt leaves no room for any chunk.
        """
        spare = padding - DEFAULT_PADDING
        padding = min(padding, self._reserve(prompt, llm))
        room = self._get_available_chunk_size(prompt, padding=padding, llm=llm, tools=tools)
        most = room + padding - DEFAULT_PADDING if spare else room
        groups: list[list[str]] = []
        left = 0
        for parts in self._units(text_chunks, most):
            cost = sum(map(self._cost, parts))
            if cost <= left:
                groups[-1] += parts
                left -= cost
            elif cost <= most:
                groups.append(list(parts))
                left = room - cost
            else:
                groups += [[piece] for part in parts for piece in self._cut(part, room)]
                left = 0
        return [Packed.of(group) for group in groups] or [""]

    def _units(self, texts: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
        """What should stay together: chunks, and those packed before as long as a prompt can take all of them."""
        for text in texts:
            parts = tuple(part for part in parts_of(text) if part.strip())
            if parts and sum(map(self._cost, parts)) <= most:
                yield parts
            else:
                yield from ((part,) for part in parts)

    def _reserve(self, prompt: BasePromptTemplate, llm: LLM | None) -> int:
        """Tokens to leave free where LlamaIndex leaves 500, for it does not know what is still to be filled in.

        That is an answer to be refined; and LlamaIndex takes the longest template by its form for completions, while
        in the form for chats that of the first question may be longer.
        """
        reader = self._llm if llm is None else _reader(llm)
        if reader is None:
            return self.num_output + DEFAULT_PADDING
        question = DEFAULT_TEXT_QA_PROMPT_SEL.partial_format(**prompt.kwargs)
        longer = prompt_tokens(reader, question) - prompt_tokens(reader, prompt)
        return max(self.num_output, longer) + DEFAULT_PADDING

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """The texts, each cut to an equal share of the room if it is longer; the list reads as its texts.

        Raises:
            ContextTooLongError: the prompt leaves no room for them.
        """
        texts = list(text_chunks)
        room = self._get_available_chunk_size(prompt, len(texts) or 1, padding=padding, llm=llm, tools=tools)
        return _Shown(text if self._cost(text) <= room else self._cut(text, room)[0] for text in texts)

    def _get_available_chunk_size(
        self,
        prompt: BasePromptTemplate,
        num_chunks: int = 1,
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> int:
        reader = self._llm if llm is None else _reader(llm)
        if reader is None:
            return super()._get_available_chunk_size(prompt, num_chunks, padding, llm, tools)
        tools = self._get_tools_from_llm(llm=llm, tools=tools)
        used = prompt_tokens(reader, prompt)
        used += self._token_counter.estimate_tokens_in_tools([tool.metadata.to_openai_tool() for tool in tools])
        room = self._get_available_context_size(used) // num_chunks - padding
        return room if self.chunk_size_limit is None else min(room, self.chunk_size_limit)

    def _get_available_context_size(self, num_prompt_tokens: int) -> int:
        room = self.context_window - num_prompt_tokens - self.num_output
        if room <= 0:
            raise ContextTooLongError(
                f"the prompt takes {num_prompt_tokens} tokens before any chunk is in it and the answer may take "
                f"{self.num_output}, together no less than the window of {self.context_window}; shorten the template, "
                "the question or the chat history (a memory with a lower token_limit), or lower max_new_tokens"
            )
        return room

    def _cost(self, chunk: str) -> int:
        """Positions that a chunk may take in a prompt."""
        soft = self._llm.engine.encoder.adapter.stored_tokens if self._llm is not None else 0
        return self._token_counter.get_string_tokens(chunk) + soft + _BORDER_TOKENS

    def _cut(self, chunk: str, room: int) -> list[str]:
        size = room - self._cost("")
        if size <= 0:
            raise ContextTooLongError(
                f"the prompt leaves {room} tokens for retrieved text, which is too little for any; shorten the "
                "template, the question or the chat history, or lower max_new_tokens"
            )
        tokens = self._token_counter.get_string_tokens(chunk)
        logger.warning("a chunk of %d tokens is cut, for the prompt has room for %d; make smaller chunks", tokens, size)
        overlap = int(self.chunk_overlap_ratio * size)
        splitter = TokenTextSplitter(
            chunk_size=size, chunk_overlap=overlap, separator=self.separator, tokenizer=self._token_counter.tokenizer
        )
        return splitter.split_text(chunk)


def _rebuild(kind: Any, llm: ConfiguredLLM | None, fields: dict[str, Any]) -> BoundaryPromptHelper:
    fields = {name: value for name, value in fields.items() if name != "class_name"}
    helper: BoundaryPromptHelper = kind(**fields, tokenizer=llm.token_ids if llm is not None else None)
    helper._llm = llm
    return helper


def prompt_tokens(llm: ConfiguredLLM, prompt: BasePromptTemplate) -> int:
    """Tokens that a model reads of a prompt whose open places are empty, its chat template included."""
    empty = {name: "" for name in prompt.template_vars if name not in prompt.kwargs}
    if not llm.metadata.is_chat_model:
        text = llm._get_prompt(prompt, **empty)
    else:
        chat = llm.chat_prompt(llm._get_messages(prompt, **empty))
        render = renderer(llm.engine.backbone.tokenizer, llm.chat_template_kwargs)
        text = chat if isinstance(chat, str) else render(fit_roles(chat, render))
    backbone = llm.engine.backbone
    return len(backbone.token_ids(text, plain=False)) + len(backbone.bos_ids())


def _reader(llm: LLM) -> ConfiguredLLM | None:
    inner = llm.llm if isinstance(llm, StructuredLLM) else llm
    return inner if isinstance(inner, ConfiguredLLM) else None
