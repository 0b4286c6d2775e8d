"""The parts of ``kvpacket bench``, in the order they run."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpacket_rag.bench import batches, first_token, memory, size, text_work
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.errors import KVPacketError

logger = logging.getLogger(__name__)
_LENGTHS = {"1k": 2, "4k": 8, "7k": 14}  # chunks of 512 tokens


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure.

    Attributes:
        parts: of :data:`PARTS`; all by default.
        chunks: of 512 tokens, where a part has a single size.
        repeats: of each side; a median is taken.
        tokens: of a decoded answer.
    """

    parts: tuple[str, ...] = ()
    chunks: int = 8
    repeats: int = 7
    tokens: int = 48

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise KVPacketError(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
        if min(self.chunks, self.repeats, self.tokens) < 1:
            raise KVPacketError("chunks, repeats and tokens must be 1 or more")


def _speedups(engine: KVPacketEngine, options: BenchOptions) -> dict[str, float]:
    found: dict[str, float] = {}
    for label, chunks in _LENGTHS.items():
        if 512 * chunks + 256 <= engine.context_window:
            found |= first_token.speedup(engine, chunks, label, options.repeats)
    return found


def _finding(engine: KVPacketEngine, options: BenchOptions) -> dict[str, float]:
    few, many = (text_work.finding(n, label, options.repeats) for n, label in ((1_000, "1k"), (100_000, "100k")))
    return few | many


PARTS: dict[str, Callable[[KVPacketEngine, BenchOptions], dict[str, float]]] = {
    "first-token": lambda engine, o: first_token.over_floor(engine, o.chunks, o.repeats),
    "preamble": lambda engine, o: first_token.preamble(engine, o.repeats),
    "assembly": lambda engine, o: memory.assembly(engine, o.chunks, o.repeats),
    "memory": lambda engine, o: memory.peak(engine, o.chunks),
    "finding": _finding,
    "decoding": lambda engine, o: text_work.decoding(engine, o.tokens, o.repeats),
    "batch": lambda engine, o: batches.throughput(engine, o.tokens, max(1, o.repeats // 3)),
    "ingest": lambda engine, o: memory.ingest(engine, o.chunks, o.repeats),
    "size": lambda engine, o: size.quantised(engine, o.repeats),
    "presses": lambda engine, o: size.thinned(engine, o.repeats),
    "speedup": _speedups,
}


def run_bench(
    load: Callable[[str], KVPacketEngine], options: BenchOptions
) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Measure part by part.

    Args:
        load: makes an engine whose packets lie in the folder it is given.
        options: what to measure.

    Yields:
        The part, and its figures by name; first ``"machine"``, with what they were measured on.

    Raises:
        KVPacketError: a part that was asked for cannot be measured. Where all are, it is passed over with a warning.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = load(folder)
        machine: dict[str, float | str] = {
            "machine": describe(engine.backbone.dtype, engine.backbone.device),
            "model": f"{engine.model_name}, {engine.backbone.architecture}",
        }
        try:
            yield "machine", machine
            for name in options.parts or tuple(PARTS):
                try:
                    yield name, dict(PARTS[name](engine, options))
                except KVPacketError as error:
                    if options.parts:
                        raise
                    logger.warning("%s is not measured: %s", name, str(error))
        finally:
            engine.close()
