"""What packets in few bits take and cost: bytes a token, and distance from packets in 16 bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

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
    base = "plain" if engine.encoder.adapter.is_empty else "packet"
    methods = {name: f"{base}@{name}" for name in ("none", *SCHEMES)}
    sums: dict[str, float] = defaultdict(float)
    for case in _cases(engine, questions):
        told, logits, stored = _read(engine, case, list(methods.values()))
        whole = logits[0]
        for name, found, num_bytes in zip(methods, logits, stored, strict=True):
            sums[f"full {name}"] += fidelity(told, found).kl * len(told)
            sums[f"whole {name}"] += fidelity(whole, found).kl * len(told)
            sums[f"bytes {name}"] += num_bytes
    width = engine.backbone.dtype.itemsize / 2
    figures: dict[str, float] = {}
    for name in SCHEMES:
        figures[f"kl_{name}"] = sums[f"full {name}"] / sums["full none"] - 1
        figures[f"kl_direct_{name}"] = sums[f"whole {name}"] / sums["full none"]
        figures[f"bytes_{name}"] = sums[f"bytes {name}"] / sums["bytes none"] * width
    return figures


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
