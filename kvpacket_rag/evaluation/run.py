"""Measures methods on data sets, one record for each question and method; goes on where it was stopped."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvpacket_rag.adapter import Adapter
from kvpacket_rag.backbone import Backbone
from kvpacket_rag.bench.clock import describe
from kvpacket_rag.chunk import MIN_MATCH_TOKENS
from kvpacket_rag.datasets.sample import QASample
from kvpacket_rag.engine import SINK
from kvpacket_rag.errors import KVPacketError
from kvpacket_rag.evaluation.case import Case
from kvpacket_rag.evaluation.measure import Measurement, measure, prefilled, tell
from kvpacket_rag.evaluation.methods import Bench, parse_method
from kvpacket_rag.evaluation.questions import PromptSettings, Question, make_questions
from kvpacket_rag.evaluation.records import Record, RecordFile

_VERSION = 3  # of what a record means; raise it when measuring changes


@dataclass(frozen=True, slots=True)
class Variant:
    """A method under the name it has in tables.

    Attributes:
        label: unique in a run.
        method: as :func:`kvpacket_rag.evaluation.methods.parse_method` knows it.
        adapter: for the methods that use one.
    """

    label: str
    method: str
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a data set is.

    Attributes:
        data: its name.
        done: questions measured, or known from before.
        total: of all.
        measured: of ``done``, those that took time.
        seconds: since the first question.
    """

    data: str
    done: int
    total: int
    measured: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """At this rate, if nothing of what is left is known; None while there is no rate."""
        return (self.total - self.done) * self.seconds / self.measured if self.measured else None


@dataclass(slots=True)
class Outcome:
    """What a run found.

    Attributes:
        records: in the order of questions and methods.
        skipped: name of a question to the reason for which it was not measured.
        short_documents: in the prompts that were, documents that are no chunks; see :class:`Question`.
    """

    records: list[Record] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    short_documents: int = 0


class Evaluation:
    """Methods of one model, ready to be measured.

    Args:
        backbone: the model.
        variants: methods in the order of the tables.
        file: where records are kept, and found again by a later run.

    Raises:
        KVPacketError: a method is unknown, or two have one label.
        AdapterError: an adapter does not fit.
    """

    def __init__(self, backbone: Backbone, variants: Sequence[Variant], file: RecordFile) -> None:
        labels = [variant.label for variant in variants]
        if not labels or len(set(labels)) < len(labels):
            raise KVPacketError(f"expected methods to measure, each once, found {', '.join(labels) or 'none'}")
        self._backbone = backbone
        self._file = file
        self._variants = list(variants)
        benches = {id(variant.adapter): Bench(backbone, variant.adapter) for variant in variants}
        self._methods = [parse_method(variant.method, benches[id(variant.adapter)]) for variant in variants]
        self._full = parse_method("full", Bench(backbone))
        self._is_warm = False

    def run(
        self,
        data: str,
        samples: Sequence[QASample],
        settings: PromptSettings,
        progress: Callable[[RunProgress], None] | None = None,
    ) -> Outcome:
        """Measure a data set; what is on record already is not measured again.

        Args:
            data: its name in tables.
            samples: of it.
            settings: of the prompts.
            progress: called after every question.

        Raises:
            KVPacketError: a method gives logits that are not finite.
        """
        found = Outcome()
        started, measured = time.monotonic(), 0
        total = len(samples) * max(1, len(settings.gold_positions))
        for done, question in enumerate(self._questions(samples, settings, found), start=1):
            if reason := self._unfit(question):
                found.skipped[question.name] = reason
            else:
                found.short_documents += question.num_short
                keys = [self._key(data, question, settings, variant) for variant in self._variants]
                missing = [number for number, key in enumerate(keys) if self._file.find(key) is None]
                for number, figures in self._measure(question, missing):
                    head: dict[str, Any] = {"key": keys[number], "method": self._variants[number].label}
                    self._file.append(Record(**head, **_about(data, question, settings.seed), **asdict(figures)))
                measured += bool(missing)
                found.records += [record for key in keys if (record := self._file.find(key))]
            if progress is not None:
                progress(RunProgress(data, done, total, measured, time.monotonic() - started))
        return found

    def _questions(self, samples: Sequence[QASample], settings: PromptSettings, found: Outcome) -> Iterator[Question]:
        return make_questions(self._backbone, samples, settings, found.skipped.__setitem__)

    def _unfit(self, question: Question) -> str:
        """Why a prompt is measured with no method; empty if it fits all of them."""
        if not question.num_chunks:
            return f"none of its documents has {MIN_MATCH_TOKENS} tokens or more, so no packet stands for one"
        soft = max(variant.adapter.stored_tokens if variant.adapter else 0 for variant in self._variants)
        needed = len(question.case.ids) + soft * question.num_chunks + question.case.max_new_tokens
        window = self._backbone.context_window
        return (
            f"prompt and answer take more than the {window} positions of the model's window" if needed > window else ""
        )

    def _key(self, data: str, question: Question, settings: PromptSettings, variant: Variant) -> str:
        backbone, case = self._backbone, question.case
        uses = variant.adapter if variant.method.partition("@")[0] == "packet" else None
        adapter = [uses.digest, uses.absorbs] if uses else [SINK]
        machine = describe(backbone.dtype, backbone.device)
        model = [backbone.weights_fingerprint, machine, sorted(backbone.eos_ids)]
        method = [variant.label, variant.method, *adapter, case.max_new_tokens]
        sample = [data, question.sample.sample_id, case.answers, settings.seed, question.gold_position]
        parts = [(part.packet_id is not None, part.ids) for part in case.parts]
        return hashlib.sha256(json.dumps([_VERSION, model, method, sample, parts]).encode()).hexdigest()

    def _measure(self, question: Question, missing: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        """Measure the methods of these numbers, one after another."""
        if not missing:
            return
        backbone, case, yes_no = self._backbone, question.case, question.sample.is_yes_no
        self._warm_up(case, missing)
        with prefilled(backbone, self._full, case) as state:
            told = tell(backbone, state, case)
            of_full = measure(backbone, case, state, told, yes_no)
        for number in missing:
            figures = of_full
            if self._variants[number].method != "full":
                with prefilled(backbone, self._methods[number], case) as state:
                    figures = measure(backbone, case, state, told, yes_no)
            if not math.isfinite(figures.kl):
                raise KVPacketError(
                    f"{self._variants[number].label} gives logits that are not finite for the question "
                    f"{question.sample.sample_id!r}; load the model in another dtype"
                )
            yield number, figures

    def _warm_up(self, case: Case, missing: Sequence[int]) -> None:
        """Run every method once, so that none is charged for what a process does only the first time."""
        if self._is_warm:
            return
        for method in (self._full, *(self._methods[number] for number in missing)):
            with prefilled(self._backbone, method, case):
                pass
        self._is_warm = True


def _about(data: str, question: Question, seed: int) -> dict[str, Any]:
    """What the records of a question have in common."""
    return {
        "data": data,
        "sample_id": question.sample.sample_id,
        "yes_no": question.sample.is_yes_no,
        "seed": seed,
        "gold_position": question.gold_position,
        "chunks": question.num_chunks,
        "prompt_tokens": len(question.case.ids),
    }
