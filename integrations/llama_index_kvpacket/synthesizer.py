"""KVPacketSynthesizer: answers from retrieved nodes, with the packets of their chunks handed to the engine."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import (
    DEFAULT_REFINE_PROMPT_SEL,
    DEFAULT_TEXT_QA_PROMPT_SEL,
    DEFAULT_TREE_SUMMARIZE_PROMPT_SEL,
)
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.response_synthesizers.type import ResponseMode
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE

from kvpacket_rag import ContextTooLongError, KVPacketError
from llama_index_kvpacket.configuration import ConfiguredLLM
from llama_index_kvpacket.prompt_helper import BoundaryPromptHelper, parts_of, prompt_tokens

logger = logging.getLogger(__name__)

_SOURCE = re.compile(r"\ASource \d+:\n")  # CitationQueryEngine puts it before the text of a node


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model that an answer takes.

    Attributes:
        template: with all but the chunks filled in.
        chunks: by the name they have in the template.
        hints: packet ids of the chunks.
    """

    template: BasePromptTemplate
    chunks: Mapping[str, str]
    hints: tuple[str, ...]


Plan = Generator[Call, str, Call]


class KVPacketSynthesizer(BaseSynthesizer):
    """Answers from nodes whose chunks come from packets, and says of each that does not why.

    LlamaIndex's own synthesizers hand texts to the model, and the engine finds the chunks in them. This one
    tells the engine which chunks it put into each prompt, so one that was retrieved and is not reused is a
    miss in ``llm.last_usage``, and with ``on_miss="error"`` an error. Chunks are laid out whole, by a
    :class:`BoundaryPromptHelper`.

    Args:
        llm: a ``KVPacketLLM``; ``Settings.llm`` by default.
        response_mode: ``"compact"``: one call as long as the window allows, and answers refined by what did not
            fit; ``"refine"``: one call a node; ``"tree_summarize"``: summaries of as much as fits, and then of
            the summaries; ``"simple_summarize"``: one call, and nodes that do not fit are left out with a warning.
        text_qa_template: for the first answer.
        refine_template: for further ones.
        summary_template: for ``tree_summarize``.
        prompt_helper: packs the chunks.
        streaming: the last call gives its answer piece by piece.
        callback_manager: of the model too, if given.

    Raises:
        KVPacketError: another model, or another response mode.

    Example:
        >>> synthesizer = KVPacketSynthesizer(llm, response_mode="simple_summarize")     # doctest: +SKIP
        >>> index.as_query_engine(llm=llm, response_synthesizer=synthesizer)             # doctest: +SKIP
    """

    def __init__(
        self,
        llm: LLM | None = None,
        response_mode: ResponseMode | str = ResponseMode.COMPACT,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        summary_template: BasePromptTemplate | None = None,
        prompt_helper: PromptHelper | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        reader = llm or Settings.llm
        if not isinstance(reader, ConfiguredLLM):
            raise KVPacketError(f"KVPacketSynthesizer needs a KVPacketLLM as llm, and got a {type(reader).__name__}")
        helper = prompt_helper or BoundaryPromptHelper.from_llm(reader)
        super().__init__(reader, callback_manager, helper, streaming=streaming)
        plans = {
            ResponseMode.COMPACT: self._compact,
            ResponseMode.REFINE: self._refine,
            ResponseMode.TREE_SUMMARIZE: self._tree_summarize,
            ResponseMode.SIMPLE_SUMMARIZE: self._simple_summarize,
        }
        if response_mode not in list(plans):
            raise KVPacketError(
                f"response_mode is {str(getattr(response_mode, 'value', response_mode))!r}, expected "
                f"{', '.join(repr(mode.value) for mode in plans)}; LlamaIndex's own synthesizers have more, and reuse "
                "packets too"
            )
        self._reader = reader
        self._plan = plans[ResponseMode(response_mode)]
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._refine_template = refine_template or DEFAULT_REFINE_PROMPT_SEL
        self._summary_template = summary_template or DEFAULT_TREE_SUMMARIZE_PROMPT_SEL

    def _get_prompts(self) -> PromptDictType:
        return {
            "text_qa_template": self._text_qa_template,
            "refine_template": self._refine_template,
            "summary_template": self._summary_template,
        }

    def _update_prompts(self, prompts: PromptDictType) -> None:
        for name in self._get_prompts().keys() & prompts.keys():
            setattr(self, f"_{name}", prompts[name])

    def synthesize(self, query: QueryTextType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> RESPONSE_TYPE:
        """Answer a query from nodes."""
        return super().synthesize(query, nodes, *args, **{"kvpacket_nodes": nodes, **kwargs})

    async def asynthesize(
        self, query: QueryTextType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any
    ) -> RESPONSE_TYPE:
        """:meth:`synthesize`, computed in worker threads."""
        return await super().asynthesize(query, nodes, *args, **{"kvpacket_nodes": nodes, **kwargs})

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        kvpacket_nodes: Sequence[NodeWithScore] = (),
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """The answer to a question from texts.

        Args:
            query_str: the question.
            text_chunks: as the prompt is to hold them.
            kvpacket_nodes: they were made of, one a text; without them the engine looks for chunks itself.
            response_kwargs: other places of the template.
        """
        plan = self._begin(query_str, text_chunks, kvpacket_nodes)
        call, is_last = _advance(plan, None)
        while not is_last:
            answer = self._hinted(call).predict(call.template, **call.chunks, **response_kwargs)
            call, is_last = _advance(plan, answer)
        llm, given = self._hinted(call), {**call.chunks, **response_kwargs}
        if self._streaming:
            return llm.stream(call.template, **given)
        return llm.predict(call.template, **given) or self._empty_response

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        kvpacket_nodes: Sequence[NodeWithScore] = (),
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """:meth:`get_response`, computed in worker threads."""
        plan = await asyncio.to_thread(self._begin, query_str, text_chunks, kvpacket_nodes)
        call, is_last = await asyncio.to_thread(_advance, plan, None)
        while not is_last:
            answer = await self._hinted(call).apredict(call.template, **call.chunks, **response_kwargs)
            call, is_last = await asyncio.to_thread(_advance, plan, answer)
        llm, given = self._hinted(call), {**call.chunks, **response_kwargs}
        if self._streaming:
            return await llm.astream(call.template, **given)
        return await llm.apredict(call.template, **given) or self._empty_response

    def _hinted(self, call: Call) -> ConfiguredLLM:
        return self._reader.hinted(call.hints)

    def _begin(self, query_str: str, texts: Sequence[str], nodes: Sequence[NodeWithScore]) -> Plan:
        hints: dict[str, str] = {}
        for text, found in zip(texts, nodes, strict=False):
            if name := self._packet_of(found.node):
                hints[text] = name
        return self._plan(query_str, list(texts), hints)

    def _packet_of(self, node: BaseNode) -> str | None:
        text = _SOURCE.sub("", node.get_content(MetadataMode.NONE), count=1)
        try:
            return self._reader.engine.encoder.identify(text)[0]
        except KVPacketError:  # it has no text, or too much of it for a packet
            return None

    def _simple_summarize(self, query: str, texts: list[str], hints: Mapping[str, str]) -> Plan:
        template = self._text_qa_template.partial_format(query_str=query)
        first, *_ = self._prompt_helper.repack(template, texts, llm=self._reader)
        if left_out := sum(1 for text in texts if text.strip() and not _holds(first, text)):
            logger.warning(
                "%d of %d chunks do not fit into one prompt and are left out; retrieve fewer, or use response_mode "
                "'compact'",
                left_out,
                len(texts),
            )
        (hinted,) = _hints_of([first], hints)
        return Call(template, {"context_str": first}, hinted)
        yield

    def _compact(self, query: str, texts: list[str], hints: Mapping[str, str]) -> Plan:
        template = self._text_qa_template.partial_format(query_str=query)
        packed = self._prompt_helper.repack(template, texts, llm=self._reader)
        if len(packed) > 1:
            packed = self._leave_room_to_refine(query, texts)
        return (yield from self._in_turn(query, packed, hints))

    def _refine(self, query: str, texts: list[str], hints: Mapping[str, str]) -> Plan:
        packed = [text for each in texts for text in self._leave_room_to_refine(query, [each])]
        return (yield from self._in_turn(query, packed, hints))

    def _leave_room_to_refine(self, query: str, texts: list[str]) -> list[str]:
        question = self._text_qa_template.partial_format(query_str=query)
        refine = self._refine_template.partial_format(query_str=query)
        answer = self._reader.max_new_tokens
        if prompt_tokens(self._reader, question) > prompt_tokens(self._reader, refine) + answer:
            return self._prompt_helper.repack(question, texts, llm=self._reader)
        return self._prompt_helper.repack(refine, texts, padding=answer + DEFAULT_PADDING, llm=self._reader)

    def _in_turn(self, query: str, packed: Sequence[str], hints: Mapping[str, str]) -> Plan:
        template = self._text_qa_template.partial_format(query_str=query)
        hinted = _hints_of(packed, hints)
        call = Call(template, {"context_str": packed[0]}, hinted[0])
        for text, names in zip(packed[1:], hinted[1:], strict=True):
            answer = yield call
            template = self._refine_template.partial_format(query_str=query, existing_answer=answer)
            call = Call(template, {"context_msg": text}, names)
        return call

    def _tree_summarize(self, query: str, texts: list[str], hints: Mapping[str, str]) -> Plan:
        template = self._summary_template.partial_format(query_str=query)
        packed = self._prompt_helper.repack(template, texts, llm=self._reader)
        while len(packed) > 1:
            summaries = []
            for text, names in zip(packed, _hints_of(packed, hints), strict=True):
                summaries.append((yield Call(template, {"context_str": text}, names)))
            hints, before = {}, len(packed)
            packed = self._prompt_helper.repack(template, summaries, llm=self._reader)
            if len(packed) >= before:
                raise ContextTooLongError(
                    f"no two summaries of up to {self._reader.max_new_tokens} tokens fit into one prompt of a window "
                    f"of {self._reader.context_window}; lower max_new_tokens, or use response_mode='compact'"
                )
        return Call(template, {"context_str": packed[0]}, *_hints_of(packed, hints))


def _holds(packed: str, text: str) -> bool:
    """Whether the text of a prompt holds a chunk whole; what a BoundaryPromptHelper packs knows its parts."""
    parts = parts_of(packed)
    return text in parts or (parts == (packed,) and text.strip() in packed)


def _hints_of(packed: Sequence[str], hints: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Packet ids for each of a plan's calls: of the chunks that its text holds whole.

    Chunks that none does, for they were cut or left out, are misses of the first one.
    """
    held = [[text for text in hints if _holds(each, text)] for each in packed]
    whole = {text for texts in held for text in texts}
    held[0] += [text for text in hints if text not in whole]
    return [tuple(hints[text] for text in texts) for texts in held]


def _advance(plan: Plan, answer: str | None) -> tuple[Call, bool]:
    """The next call of a plan, and whether it is the last one."""
    try:
        return (next(plan) if answer is None else plan.send(answer)), False
    except StopIteration as end:
        return end.value, True
