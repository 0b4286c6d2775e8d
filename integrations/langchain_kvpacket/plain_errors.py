"""Errors of constructors in one sentence, without what pydantic wraps around them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

from langchain_core.load.serializable import Serializable
from pydantic import ValidationError

from kvpacket_rag import KVPacketError


class PlainErrors(Serializable):
    """Raises KVPacketError for arguments that pydantic refuses; what validators raise themselves comes as it is."""

    other_words: ClassVar[Iterable[str]] = ()
    """Arguments that are understood though they are no fields."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        try:
            super().__init__(*args, **fields)
        except ValidationError as error:
            found = [_sentence(fault, type(self)) for fault in error.errors(include_url=False, include_context=False)]
            raise KVPacketError(f"{type(self).__name__}: {'; '.join(found)}") from None


def _sentence(fault: Any, owner: type[PlainErrors]) -> str:
    """What is wrong with one argument; its value is shown only if it is short, and no place for secrets."""
    name = ".".join(map(str, fault["loc"])) or "arguments"
    if fault["type"] != "extra_forbidden":
        value = fault["input"]
        shown = f", not {value!r}" if isinstance(value, str | int | float | bool | None) else ""
        return f"{name}: {fault['msg'][:1].lower()}{fault['msg'][1:]}{shown}"
    known = sorted(owner.model_fields)
    near = difflib.get_close_matches(name, [*known, *owner.other_words], 1)
    return f"there is no {name}" + (f" (meant {near[0]}?)" if near else f"; it takes {', '.join(known)}")
