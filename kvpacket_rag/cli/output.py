"""What the commands print: results to standard output, progress and messages to standard error."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from kvpacket_rag.chunk import Chunk
    from kvpacket_rag.evaluation.run import RunProgress
    from kvpacket_rag.progress import IngestProgress

_LINE_SECONDS = 5.0  # between two lines of progress where no bar can be drawn
_EVAL_SECONDS = 10.0  # the same of measuring
T = TypeVar("T")


def say(message: str) -> None:
    """A message that is no result; above the bar, where one is drawn."""
    if tqdm := getattr(sys.modules.get("tqdm"), "tqdm", None):
        tqdm.write(message, file=sys.stderr)
    else:
        print(message, file=sys.stderr, flush=True)


def show(text: str = "", end: str = "\n") -> None:
    """A result, visible at once."""
    print(text, end=end, flush=True)


def show_json(value: Any) -> None:
    """A result for programs to read."""
    show(json.dumps(value, indent=2, ensure_ascii=False))


def size(num_bytes: float) -> str:
    """Bytes in the unit that gives a handy number: ``"1.2 GB"``."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    step = min(int(math.log(max(num_bytes, 1), 1000)), len(units) - 1)
    return f"{num_bytes / 1000**step:.{min(step, 1)}f} {units[step]}"


def duration(seconds: float) -> str:
    """``"8 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``"1 packet"``, ``"1,204 packets"``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    rows = list(pairs)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers under their headings, aligned right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def source(chunk: Chunk) -> str:
    """A chunk's document by title and id; by the id alone where it has no title."""
    name, document_id = chunk.title, chunk.document_id
    return name if name.startswith(document_id) else f"{name}  ({document_id})"


class Bar:
    """Progress of encoding: a bar on a terminal, else a line every few seconds. Draws nothing before the first news."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown = (0, 0)  # tokens done and in all
        self._next_line = 0.0

    def __call__(self, progress: IngestProgress) -> None:
        """Show how far it is, once something had to be encoded."""
        news, left = (progress.tokens_done, progress.tokens_total), progress.seconds_left
        if left is None or news == self._shown:
            return
        self._shown = news
        rate = f"{progress.tokens_per_second:,.0f} tokens/s, {duration(left)} left"
        if sys.stderr.isatty():
            self._draw(progress, rate)
        elif time.monotonic() > self._next_line or progress.tokens_done == progress.tokens_total:
            self._next_line = time.monotonic() + _LINE_SECONDS
            say(f"{progress.tokens_done:,} of {progress.tokens_total:,} tokens done ({rate})")

    def _draw(self, progress: IngestProgress, rate: str) -> None:
        from tqdm import tqdm

        if self._bar is None or self._bar.total != progress.tokens_total:  # the first, or the next thing to encode
            self.__exit__(None, None, None)
            shape = "encoding {percentage:3.0f}% |{bar:30}| {n:,} of {total:,} tokens{postfix}"
            self._bar = tqdm(total=progress.tokens_total, bar_format=shape, leave=False)
        self._bar.set_postfix_str(rate, refresh=False)
        self._bar.update(progress.tokens_done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class ProgressLine:
    """Progress of measuring: one line written over on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._next_line = 0.0

    def __call__(self, progress: RunProgress) -> None:
        """Show how far it is."""
        left = progress.seconds_left
        text = f"{progress.data}: {progress.done} of {count(progress.total, 'question')}"
        if left is not None:
            text += f", {progress.seconds / progress.measured:.1f} s each, {duration(left)} left"
        if sys.stderr.isatty():
            print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() > self._next_line or progress.done == progress.total:
            self._next_line = time.monotonic() + _EVAL_SECONDS
            say(text)

    def end(self) -> None:
        """Leave the line."""
        if sys.stderr.isatty():
            print(file=sys.stderr)


def counted(items: Iterable[T], noun: str) -> Iterator[T]:
    """The items, with a running count on a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from tqdm import tqdm

    yield from tqdm(items, bar_format=f"reading {{n}} {noun}", leave=False)
