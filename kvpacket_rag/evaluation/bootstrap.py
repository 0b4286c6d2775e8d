"""95 % intervals by drawing questions again with replacement (percentile bootstrap, Efron 1979)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Statistic = Callable[..., Array]

_DRAWS = 2000
_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and what it comes to on questions drawn again.

    Attributes:
        value: on the questions themselves; not finite where the figure is not defined.
        draws: (2000,) one a draw.
    """

    value: float
    draws: Array

    @property
    def is_defined(self) -> bool:
        """Whether there is a figure."""
        return bool(np.isfinite(self.value))

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self._end(_TAIL)

    @property
    def high(self) -> float:
        """Upper end of it."""
        return self._end(1 - _TAIL)

    def _end(self, share: float) -> float:
        return float(np.quantile(self.draws[np.isfinite(self.draws)], share))


def estimate(statistic: Statistic, *columns: Sequence[float], seed: int = 0) -> Estimate:
    """A statistic of paired columns, with its draws.

    Args:
        statistic: takes arrays (..., questions), one a column, and reduces the last axis.
        columns: one number a question each, in the same order, so that pairs stay together; at least one question.
        seed: of the draws.
    """
    data = np.asarray(columns, dtype=np.float64)
    places = np.random.default_rng(seed).integers(0, data.shape[1], (_DRAWS, data.shape[1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(float(statistic(*data)), statistic(*data[:, places]))


def estimate_of_runs(statistic: Statistic, runs: Sequence[Sequence[float]], seed: int = 0) -> Estimate:
    """A statistic of all runs together, of which those of one question are drawn together.

    Args:
        statistic: takes an array (..., runs) and reduces the last axis; leaves out what is not a number.
        runs: of each question, at least one.
        seed: of the draws.
    """
    data = np.full((len(runs), max(map(len, runs))), np.nan)
    for row, values in zip(data, runs, strict=True):
        row[: len(values)] = values
    places = np.random.default_rng(seed).integers(0, len(data), (_DRAWS, len(data)))
    return Estimate(float(statistic(data.ravel())), statistic(data[places].reshape(_DRAWS, -1)))


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of figures from different data sets, each set's questions drawn apart."""
    return Estimate(
        float(np.mean([found.value for found in estimates])), np.mean([found.draws for found in estimates], axis=0)
    )


def mean(values: Array) -> Array:
    """Of every row."""
    return np.asarray(values.mean(-1))


def median(values: Array) -> Array:
    """Of every row, but for what is not a number."""
    return np.asarray((np.nanmedian if np.isnan(values).any() else np.median)(values, -1))


def percentile_95(values: Array) -> Array:
    """Of every row, but for what is not a number; between two values where it falls there."""
    return np.asarray((np.nanquantile if np.isnan(values).any() else np.quantile)(values, 0.95, axis=-1))


def difference(one: Array, other: Array) -> Array:
    """Mean of one minus mean of the other."""
    return np.asarray(one.mean(-1) - other.mean(-1))


def recovered_divergence(method: Array, plain: Array) -> Array:
    """Share of the divergence of plain concatenation that a method removes: 1 is full prefill, 0 plain concatenation.

    A ratio of means, so that questions on which plain concatenation is nearly right do not dominate.
    """
    return np.asarray(1 - method.mean(-1) / plain.mean(-1))


def recovered_score(method: Array, plain: Array, full: Array) -> Array:
    """The same of a score that rises with quality: (method - plain) / (full - plain), of means."""
    return np.asarray((method.mean(-1) - plain.mean(-1)) / (full.mean(-1) - plain.mean(-1)))
