"""Prompts that a user has put into the model's chat template already.

A text model's caller may do either: write plain text, or a whole prompt with the template's control strings, as
``HuggingFacePipeline`` reads it. Putting the template around a template would show the model nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvpacket_rag import KVPacketEngine, PromptError

_TEXT = "kvpacket_text"


@dataclass(frozen=True, slots=True)
class TemplateMarks:
    """What a model's chat template puts around a message of the user.

    Attributes:
        begins: strings with which a rendered prompt may begin.
        end: string with which it ends, so that the model answers next.
        controls: control strings in it.
    """

    begins: tuple[str, ...]
    end: str
    controls: tuple[str, ...]

    @classmethod
    def of(cls, engine: KVPacketEngine, template_kwargs: Mapping[str, Any]) -> Self:
        """As the template renders them.

        Raises:
            PromptError: it does not render a message.
        """
        tokenizer = engine.backbone.tokenizer
        options = {**template_kwargs, "tokenize": False, "add_generation_prompt": True}
        try:
            rendered = str(tokenizer.apply_chat_template([{"role": "user", "content": _TEXT}], **options))
            head, tail = rendered.split(_TEXT, 1)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise PromptError(f"the chat template of {engine.model_name!r} renders no message: {error}") from error
        special = [str(token) for token in tokenizer.all_special_tokens if str(token)]
        plain = head
        for token in special:
            plain = plain.replace(token, "")
        last = max((tail.rfind(token) for token in special), default=-1)
        lines = plain.strip().splitlines()[-1:]  # such as [INST], where the token before it is left to the tokenizer
        begins = {*(token for token in special if token in head), *(line for line in lines if not line.isalpha())}
        controls = tuple(token for token in special if token in rendered)
        return cls(tuple(begins), tail[max(last, 0) :].strip(), controls)

    def are_around(self, prompt: str) -> bool:
        """Whether a prompt begins and ends as the template has it.

        Both, for a retrieved text must not be able to pass for a template of its own.
        """
        prompt = prompt.strip()
        return bool(self.end) and prompt.startswith(self.begins) and prompt.endswith(self.end)

    def inside(self, prompt: str) -> list[str]:
        """Control strings that a prompt holds."""
        return [control for control in self.controls if control in prompt]
