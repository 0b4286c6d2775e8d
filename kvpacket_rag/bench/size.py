"""What smaller packets take and cost: bytes a token, and distance from whole packets in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvpacket_rag.compress.scheme import SCHEMES
from kvpacket_rag.datasets import open_dataset
from kvpacket_rag.engine import KVPacketEngine
from kvpacket_rag.evaluation.case import Case, score
from kvpacket_rag.evaluation.measure import prefilled, tell
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.evaluation.metrics import fidelity
from kvpacket_rag.evaluation.questions import PromptSettings, make_questions

_DATA = ("niah", "biography")
_SETTINGS = PromptSettings(max_chunks=5, chunk_tokens=128, max_new_tokens=16)


def quantised(engine: KVPacketEngine, questions: int) -> dict[str, float]:
    """Quantised packets beside those in the model's own numbers, on made-up texts.

    Args:
        engine: with the adapter that is measured, or none.
        questions: of each kind of text.

    Returns:
        For every scheme ``kl_NAME``, what it adds to KL(full prefill ‖ packets) along full prefill's answers, as a
        share of that; it may be negative, since it is the difference of two. ``kl_direct_NAME``, KL(packets ‖
        quantised) as the same share, which counts what cancels out as well, the noise of 16-bit arithmetic too.
        ``bytes_NAME``, bytes a token as a share of 16-bit packets.
    """
    found = _totals(engine, questions, ["none", *SCHEMES])
    whole = found["none"]
    width = engine.backbone.dtype.itemsize / 2
    figures: dict[str, float] = {}
    for name in SCHEMES:
        figures[f"kl_{name}"] = found[name].from_full / whole.from_full - 1
        figures[f"kl_direct_{name}"] = found[name].from_whole / whole.from_full
        figures[f"bytes_{name}"] = found[name].num_bytes / whole.num_bytes * width
    return figures


def thinned(engine: KVPacketEngine, questions: int) -> dict[str, float]:
    """Packets that left tokens out beside those that left as many out at random, on the same texts.

    Args:
        engine: with the adapter that is measured, or none.
        questions: of each kind of text.

    Returns:
        ``press_over_random_30`` and ``_50``: what :class:`~kvpacket_rag.compress.press.RereadPress` adds to KL(full
        prefill ‖ packets) where 30 and 50 % are left out, by what chance adds. It is below 0 where either comes
        nearer to full prefill than whole packets, and left out where chance adds nothing at all.

    Raises:
        UnsupportedModelError: the model's packets cannot be thinned.
    """
    shares = {"30": "0.3", "50": "0.5"}
    sizes = [f"{press}-{share}" for share in shares.values() for press in ("reread", "random")]
    found = _totals(engine, questions, ["none", *sizes])
    added = {size: found[size].from_full - found["none"].from_full for size in sizes}
    return {
        f"press_over_random_{name}": added[f"reread-{share}"] / added[f"random-{share}"]
        for name, share in shares.items()
        if added[f"random-{share}"]
    }


@dataclass(slots=True)
class _Total:
    """Over all tokens of all answers: divergence from full prefill and from whole packets; and what was stored."""

    from_full: float = 0.0
    from_whole: float = 0.0
    num_bytes: int = 0


def _totals(engine: KVPacketEngine, questions: int, sizes: Sequence[str]) -> dict[str, _Total]:
    """What packets of every size add up to; the first size is that of whole ones."""
    base = "plain" if engine.encoder.adapter.is_empty else "packet"
    totals = {size: _Total() for size in sizes}
    for case in _cases(engine, questions):
        told, logits, stored = _read(engine, case, [f"{base}@{size}" for size in sizes])
        for total, found, num_bytes in zip(totals.values(), logits, stored, strict=True):
            total.from_full += fidelity(told, found).kl * len(told)
            total.from_whole += fidelity(logits[0], found).kl * len(told)
            total.num_bytes += num_bytes
    return totals


def _cases(engine: KVPacketEngine, questions: int) -> Iterator[Case]:
    for data in _DATA:
        samples = open_dataset(data, "dev", seed=7, limit=questions)
        for question in make_questions(engine.backbone, samples, _SETTINGS):
            yield question.case


def _read(engine: KVPacketEngine, case: Case, methods: Sequence[str]) -> tuple[Tensor, list[Tensor], list[int]]:
    """Logits of full prefill along its own answer, those of every method, and what each had stored."""
    backbone = engine.backbone
    bench = Bench(backbone, engine.encoder.adapter)
    with prefilled(backbone, parse_method("full", bench), case) as state:
        told = tell(backbone, state, case)
    logits, stored = [], []
    for name in methods:
        with prefilled(backbone, parse_method(name, bench), case) as state:
            logits.append(score(backbone, state, told.ids).clone())
            stored.append(state.packet_bytes)
    return told.logits, logits, stored
