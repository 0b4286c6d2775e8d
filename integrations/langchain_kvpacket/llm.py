"""A LangChain text model that answers from packets."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict, model_validator

from kvpacket_rag import Answer, Message
from langchain_kvpacket.call import Call, Prompt, answer_facts, beside
from langchain_kvpacket.final_prompt import TemplateMarks
from langchain_kvpacket.options import EngineFields

Config = RunnableConfig | list[RunnableConfig] | None
_IS_FINAL = "prompts are in the model's chat template already and are read as they stand; raw=True says so for all"
_HOLDS_CONTROLS = (
    "a prompt that is put into the model's chat template holds %s, which the model reads as plain text; pass raw=True "
    "if prompts are final, or raw=False if that is text of yours"
)


class KVPacketLLM(EngineFields, BaseLLM):
    """Text model that takes the text it knows from packets and reads only the rest.

    Code written for ``HuggingFacePipeline`` runs with this class in its place: made by :meth:`from_model_id` or around
    a ``pipeline``, it reads every prompt as it stands, as the original does. Made in any other way, it puts a prompt
    that is not in the model's chat template yet there as one message of the user, so that an instruction model answers
    it. For whole chats, :class:`ChatKVPacket` keeps the roles apart.

    Setup:
        ``pip install "kvpacket-rag[langchain]"``. The model runs in this process; there is no key.

    Key init args — completion params:
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop: of decoding.
        raw: True reads prompts as they stand, with every control token in them; False puts all into the chat
            template; None, the default, puts those there that are not in it yet.
        match, on_miss: which chunks are looked for, and what a miss does.

    Key init args — engine params:
        model, store, adapter, device, dtype: what the engine is loaded from; or engine, one that is
            there already, or :meth:`from_engine`.

    Instantiate:
        >>> llm = KVPacketLLM(model="smollm2-135m-instruct", store="library", max_tokens=64)
        >>> llm = KVPacketLLM.from_model_id("smollm2-135m-instruct", pipeline_kwargs={"max_new_tokens": 64})

    Invoke:
        >>> llm.invoke(f"{chunk}\\n\\nWho signed it?")  # doctest: +SKIP

    Stream:
        >>> for piece in llm.stream("Who signed it?"):  # doctest: +SKIP
        ...     print(piece, end="")

    Async:
        >>> await llm.ainvoke("Who signed it?")  # doctest: +SKIP

    Token usage:
        ``llm.generate([prompt]).llm_output["token_usage"]``.

    Response metadata:
        Each generation's ``generation_info`` has chunks_reused, packet_tokens, preamble_tokens, prefilled_tokens,
        misses (with reasons), timings (seconds), finish_reason and token_usage. ``invoke`` and chains return the
        text alone; ``llm.last_usage`` then tells of the answer that was finished last.
    """

    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)

    raw: bool | None = None
    """Whether prompts are final; None sees to each, see the class."""

    @model_validator(mode="before")
    @classmethod
    def _read_like_a_pipeline(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values if values.get("pipeline") is None else {"raw": True, **values}

    @classmethod
    def from_model_id(cls, model_id: str, task: str | None = None, **fields: Any) -> Self:
        """A model by name that reads prompts as they stand, with the arguments of ``HuggingFacePipeline``'s method.

        It takes the most likely token each time unless ``do_sample`` or ``temperature`` says otherwise; a model's own
        ``generation_config``, by which a pipeline may draw, has no say. An answer never holds its prompt.

        Args:
            model_id: short name, path or hub name.
            task: ``"text-generation"``, the only one there is.
            fields: of this class, or device_map, model_kwargs, pipeline_kwargs and batch_size.
        """
        return super().from_model_id(model_id, task, **{"raw": True, **fields})

    @property
    def _llm_type(self) -> str:
        return "kvpacket"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**self._identity(), "raw": self.raw}

    def batch(
        self, inputs: list[LanguageModelInput], config: Config = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[str]:
        """As in the base class; with ``return_exceptions``, a prompt that fails takes no other's answer with it."""
        found = super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        if not _failed_together(found):
            return found
        each = zip(inputs, get_config_list(config, len(inputs)), strict=True)
        return [self.batch([one], own, return_exceptions=True, **kwargs)[0] for one, own in each]

    async def abatch(
        self, inputs: list[LanguageModelInput], config: Config = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[str]:
        """As :meth:`batch`."""
        found = await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        if not _failed_together(found):
            return found
        each = zip(inputs, get_config_list(config, len(inputs)), strict=True)
        return [(await self.abatch([one], own, return_exceptions=True, **kwargs))[0] for one, own in each]

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        answers = self._answers(call, [self._prompt(prompt, call) for prompt in prompts])
        return self._result([(answer.text, self._facts(answer)) for answer in answers])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        answers = []
        for prompt in prompts:
            # Token by token, so that a task that is cancelled stops the model too.
            chunks = [chunk async for chunk in self._astream(prompt, stop, **kwargs)]
            answers.append(("".join(chunk.text for chunk in chunks), chunks[-1].generation_info or {}))
        return self._result(answers)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._call(stop, kwargs)
        stream = self._start(call, self._prompt(prompt, call))
        try:
            for piece in stream:
                yield _reported(GenerationChunk(text=piece), run_manager)
            answer = stream.answer
        finally:
            stream.close()
        yield _reported(GenerationChunk(text="", generation_info=self._facts(answer)), run_manager)

    def _prompt(self, text: str, call: Call) -> Prompt:
        if self.raw or not self.engine.has_chat_template:
            return text
        if self.raw is None:
            marks = TemplateMarks.of(self.engine, call.template_kwargs)
            if marks.are_around(text):
                beside(self.engine).once(logging.INFO, _IS_FINAL)
                return text
            if controls := marks.inside(text):
                beside(self.engine).once(logging.WARNING, _HOLDS_CONTROLS, ", ".join(controls))
        return [Message("user", text)]

    def _facts(self, answer: Answer) -> dict[str, Any]:
        usage = answer.usage
        return {
            **answer_facts(self.model, answer),
            "token_usage": _counts(usage.prompt_tokens, usage.completion_tokens),
        }

    def _result(self, answers: Sequence[tuple[str, dict[str, Any]]]) -> LLMResult:
        generations = [[Generation(text=text, generation_info=facts)] for text, facts in answers]
        used = [facts["token_usage"] for _, facts in answers]
        total = _counts(sum(u["prompt_tokens"] for u in used), sum(u["completion_tokens"] for u in used))
        return LLMResult(generations=generations, llm_output={"model_name": self.model, "token_usage": total})


def _failed_together(found: Sequence[object]) -> bool:
    """Whether LangChain gave one error to each prompt of a batch."""
    return len(found) > 1 and isinstance(found[0], Exception) and all(each is found[0] for each in found)


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _reported(chunk: GenerationChunk, run_manager: CallbackManagerForLLMRun | None) -> GenerationChunk:
    if run_manager is not None:
        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
    return chunk
