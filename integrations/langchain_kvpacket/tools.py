"""Tools by the model's own chat template: how it shows them to the model, and how the model writes a call.

Neither is assumed. The template is asked to render a call; what it puts around the call's JSON is what a call looks
like, in the chat so far and in an answer.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.messages import ToolCall
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from kvpacket_rag import KVPacketEngine, PromptError

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool

NO_TOOLS = (
    "the chat template of {!r} shows the model no tools, so tool calling is not supported. Retrieve before the model "
    "is asked: in a chain, or in an agent without tools whose @dynamic_prompt holds the documents; or use a model "
    "whose template takes tools"
)
NO_FORCED_CALL = (
    "tool_choice is {!r}, but a call cannot be forced, only 'auto' or 'none'; so with_structured_output and an agent's "
    "response_format are not supported either. Ask for JSON in the prompt and parse it with JsonOutputParser, or use "
    "another chat model"
)
_ODD_CALLS = (
    "the chat template of {!r} writes tool calls in another form than JSON with a name and arguments, which is the "
    "only form that is read here; use another model or another chat_template"
)
_TOO_DEEP = "the arguments that a tool takes nest too deeply to be shown to a model, or in a circle; make them plainer"
_NAME, _VALUE, _TEXT = "kvpacket_probe", "kvpacket_value", "kvpacket_text"


def to_tools(tools: Sequence[Tool], choice: Any) -> list[dict[str, Any]]:
    """The tools in OpenAI's form, which chat templates take; none if the choice is ``"none"``.

    Raises:
        NotImplementedError: the choice forces a call.
        PromptError: they are no list, or one cannot be described.
    """
    if choice not in (None, False, "auto", "none"):
        raise NotImplementedError(NO_FORCED_CALL.format(choice))
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise PromptError(f"tools is a {type(tools).__name__}; pass a list of functions, classes or LangChain tools")
    try:
        return [] if choice == "none" else [convert_to_openai_tool(tool) for tool in tools]
    except RecursionError as error:
        raise PromptError(_TOO_DEEP) from error


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes that it calls a tool.

    Attributes:
        begin: stands before the JSON in an answer, such as ``<tool_call>``: without control tokens, which answers do
            not show, and without the bracket of a list; it may be empty.
        end: stands after it.
    """

    begin: str
    end: str

    @classmethod
    def of(cls, engine: KVPacketEngine, template_kwargs: Mapping[str, Any]) -> Self:
        """As the chat template writes it.

        Args:
            engine: whose model it is.
            template_kwargs: for the template, the tools among them.

        Raises:
            PromptError: the template shows no tools, or writes calls in another form than JSON.
        """
        render = _renderer(engine, template_kwargs)
        if not engine.has_chat_template or render(None) == render(None, tools=None):
            raise PromptError(NO_TOOLS.format(engine.model_name))
        call = {"type": "function", "id": "probe0000", "function": {"name": _NAME, "arguments": {"value": _VALUE}}}
        text = render({"role": "assistant", "content": _TEXT})
        called = render({"role": "assistant", "content": "", "tool_calls": [call]})
        head, tail = _common(text, called), _common(text[::-1], called[::-1])
        try:
            start = called.rindex("{", head, called.index(_NAME, head))
            written, end = json.JSONDecoder().raw_decode(called, start)
            next(name for name, value in written.items() if value == {"value": _VALUE})
        except (ValueError, AttributeError, StopIteration) as error:
            raise PromptError(_ODD_CALLS.format(engine.model_name)) from error
        begin, close = (_as_answered(engine, part) for part in (called[head:start], called[end : len(called) - tail]))
        return cls(begin.removesuffix("["), close.removeprefix("]"))  # a list is JSON too

    def read(self, answer: str) -> tuple[str, list[ToolCall]]:
        """The text of an answer beside its calls, and the calls; what is no whole call stays text."""
        outside: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while (start := self._next(answer, position)) is not None:
            found, end = _calls_at(answer, start + len(self.begin))
            if found:
                outside.append(answer[position:start])
                rest = answer[end:].lstrip()
                end = len(answer) - len("" if self.end.startswith(rest) else rest.removeprefix(self.end))
            else:
                end = start + max(1, len(self.begin))
                outside.append(answer[position:end])
            calls, position = calls + found, end
        outside.append(answer[position:])
        return ("".join(outside).rstrip() if calls else answer), calls

    def certain(self, beginning: str) -> str:
        """What of the beginning of an answer is text beside calls, however the answer goes on."""
        if self.begin:
            start = beginning.find(self.begin)
            partial = (n for n in range(len(self.begin) - 1, 0, -1) if beginning.endswith(self.begin[:n]))
            cut = start if start >= 0 else len(beginning) - next(partial, 0)
        else:
            cut = 0 if beginning.lstrip()[:1] in ("", "{", "[") else len(beginning)
        return beginning[:cut].rstrip()

    def _next(self, answer: str, position: int) -> int | None:
        """Where a call may begin: at its opening, or, without one, where nothing but calls came before."""
        if self.begin:
            start = answer.find(self.begin, position)
            return start if start >= 0 else None
        rest = answer[position:].lstrip()
        return len(answer) - len(rest) if rest.startswith(("{", "[")) else None


def _renderer(engine: KVPacketEngine, template_kwargs: Mapping[str, Any]) -> Callable[..., str]:
    def render(turn: dict[str, Any] | None, **changed: Any) -> str:
        chat = [{"role": "user", "content": _TEXT}, *([turn] if turn else [])]
        try:
            options = {**template_kwargs, **changed, "tokenize": False}
            return str(engine.backbone.tokenizer.apply_chat_template(chat, **options))
        except RecursionError as error:
            raise PromptError(_TOO_DEEP) from error
        except Exception as error:  # a template is a program of its own and may raise anything
            raise PromptError(f"the chat template of {engine.model_name!r} refuses tools: {error}") from error

    return render


def _common(first: str, second: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _as_answered(engine: KVPacketEngine, text: str) -> str:
    return engine.backbone.decode(engine.backbone.token_ids(text, plain=False)).strip()


def _calls_at(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Calls whose JSON, one or a list, stands at a place in a text, and where it ends; none if it is no call."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):  # no JSON, or nested deeper than Python reads it
        return [], start
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    whole = [call for call in calls if call is not None]
    return (whole if len(whole) == len(calls) else []), end


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=value["name"], args=arguments, id=f"call_{uuid.uuid4().hex[:24]}", type="tool_call")
