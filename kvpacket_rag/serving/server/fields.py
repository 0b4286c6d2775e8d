"""The fields of a JSON object, taken one by one with their types; what is left at the end is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from kvpacket_rag.serving.server.errors import ApiError, invalid

T = TypeVar("T", bound=str)

# What OpenAI's clients may send and what changes no answer here, whatever its value
_WITHOUT_EFFECT = frozenset(
    "user metadata store safety_identifier prompt_cache_key prompt_cache_retention service_tier "
    "parallel_tool_calls".split()
)
# What would change the answer, with the values that leave it as it is
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
}
_REASONS = {
    "n": "one answer is written a request; send the request again for another",
    "tools": "this server calls no tools; retrieve first, by 'retrieve' or in a chain",
    "logprobs": "log probabilities are not given",
    "response_format": "answers are free text; ask for JSON in the prompt",
    "retrieve": "it is for /v1/chat/completions",
}


class Fields:
    """What an object holds; null counts as left out, as OpenAI's clients mean it.

    Args:
        body: the object.
        path: of the object in the request, such as ``"stream_options"``.
    """

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._path = f"{path}." if path else ""

    @classmethod
    def inside(cls, path: str, value: Any) -> Self:
        """Of an object within the request.

        Raises:
            ApiError: it is none.
        """
        if not isinstance(value, dict):
            raise invalid(path, f"{path} is a {kind_of(value)}, expected an object", "invalid_type")
        return cls(value, path)

    def take(self, name: str) -> Any:
        """The value, or None."""
        return self._left.pop(name, None)

    def rest(self) -> dict[str, Any]:
        """All that is left."""
        rest, self._left = self._left, {}
        return rest

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(name, value, "a string")
        return value

    def boolean(self, name: str) -> bool:
        """True or false; false if left out."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong_type(name, value, "true or false")
        return bool(value)

    def integer(self, name: str, least: int | None = None, most: int | None = None) -> int | None:
        """A whole number."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, value, "a whole number")
        if (least is not None and value < least) or (most is not None and value > most):
            raise invalid(self._path + name, f"{self._path}{name} is {value}, expected {_range(least, most)}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, value, "a number")
        if not least <= value <= most:
            raise invalid(self._path + name, f"{self._path}{name} is {value}, expected {_range(least, most)}")
        return float(value)

    def one_of(self, name: str, allowed: Sequence[T], default: T) -> T:
        """One of a few words."""
        value = self.text(name)
        if value is None:
            return default
        for word in allowed:
            if word == value:
                return word
        words = ", ".join(map(repr, allowed))
        raise invalid(self._path + name, f"{self._path}{name} is {value[:100]!r}, expected one of {words}")

    def refuse_rest(self, kind: str = "") -> None:
        """See that what is left changes nothing.

        Raises:
            ApiError: a parameter is unknown, or known and without effect here though it is asked for one.
        """
        for name, value in self._left.items():
            if kind and (name in _WITHOUT_EFFECT or any(_equal(value, fine) for fine in _NEUTRAL.get(name, ()))):
                continue
            reason = _REASONS.get(name, "leave it out") if kind else "leave it out"
            known = kind and (name in _NEUTRAL or name in _REASONS)
            told = "is not supported, for it would change the answer" if known else "is no parameter that is known here"
            code = "unsupported_parameter" if known else "unknown_parameter"
            raise invalid(self._path + name, f"{(self._path + name)[:100]!r} {told}: {reason}", code)

    def _wrong_type(self, name: str, value: Any, expected: str) -> ApiError:
        return invalid(
            self._path + name, f"{self._path}{name} is a {kind_of(value)}, expected {expected}", "invalid_type"
        )


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _equal(value: Any, fine: Any) -> bool:
    return value == fine and isinstance(value, bool) == isinstance(fine, bool)


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"at least {least}"
    return f"{least} to {most}" if least is not None else f"at most {most}"
