"""Answers that are to fill a class: LlamaIndex asks for JSON and parses it; what is none is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model

from kvpacket_rag.errors import KVPacketError
from llama_index_kvpacket.configuration import ConfiguredLLM


class StructuredAnswers(ConfiguredLLM):
    """``structured_predict``, and so ``as_structured_llm`` and query engines with an ``output_cls``."""

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """As LlamaIndex has it.

        Raises:
            KVPacketError: the model's answer is not what was asked for. LlamaIndex's own errors of that kind are caught
                by its query engines, whose answer is empty then.
        """
        with _told(output_cls):
            answer: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return answer

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """:meth:`structured_predict`, computed in a worker thread."""
        with _told(output_cls):
            answer: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return answer


@contextmanager
def _told(output_cls: type[Model]) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise KVPacketError(
            f"the model's answer is no JSON of {output_cls.__name__} ({str(error)[:300]}); models as small as the "
            "default one seldom write it: take a larger one, or ask for a text and parse that"
        ) from error
