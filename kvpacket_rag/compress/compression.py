"""What is asked of a press: its name, how much it removes, and what it must leave alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvpacket_rag.errors import PacketError

PRESSES = ("random", "reread", "keydiff", "mixkv", "cur", "leverage", "tova", "snapkv", "compactor", "kvzap")


@dataclass(frozen=True, slots=True)
class Compression:
    """Tokens left out of packets when they are encoded.

    Attributes:
        press: what chooses them, one of :data:`PRESSES`.
        ratio: share of a packet's tokens that is removed, in [0, 1).
        protect_adapter: keep the adapter's soft tokens, at the cost of as many tokens of the chunk.
        weights: folder of the press's own weights, for ``"kvzap"``; None for those on the hub.

    Raises:
        PacketError: there is no such press, or the ratio is outside [0, 1).
    """

    press: str
    ratio: float
    protect_adapter: bool = False
    weights: Path | None = None

    def __post_init__(self) -> None:
        if self.press not in PRESSES:
            raise PacketError(f"there is no press {self.press!r}; known are {', '.join(PRESSES)}")
        if not 0 <= self.ratio < 1:
            raise PacketError(
                f"{self.press} is to remove a share of {self.ratio:g}; expected 0 up to below 1, such as 0.3"
            )
        if self.weights is not None and self.press != "kvzap":
            raise PacketError(f"weights are for kvzap alone, and {self.press} has none; leave them out")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``"NAME:RATIO"``, such as ``"reread:0.3"``.

        May be followed by ``":protect"``, to keep soft tokens, and by ``":weights=FOLDER"``.

        Raises:
            PacketError: the text is of another form, or asks for what there is not.
        """
        form = re.fullmatch(
            r"(?P<press>\w+)[:-](?P<ratio>[^:]+)(?P<protect>:protect)?(:weights=(?P<weights>.+))?", text
        )
        try:
            ratio = float(form["ratio"]) if form else math.nan
        except ValueError:
            ratio = math.nan
        if form is None or math.isnan(ratio):
            raise PacketError(
                f"{text!r} says nothing of how to compress; expected NAME:RATIO, such as reread:0.3, with the share "
                f"that is removed and one of {', '.join(PRESSES)}"
            )
        weights = Path(form["weights"]).expanduser().absolute() if form["weights"] else None
        return cls(form["press"], ratio, form["protect"] is not None, weights)

    def __str__(self) -> str:
        protected = ":protect" if self.protect_adapter else ""
        weights = f":weights={self.weights}" if self.weights else ""
        return f"{self.press}:{self.ratio}{protected}{weights}"

    def num_kept(self, num_tokens: int) -> int:
        """Of so many tokens, at least one."""
        return max(1, num_tokens - int(num_tokens * self.ratio + 1e-9))  # 0.9 of 10 is 9, not 8.999…
