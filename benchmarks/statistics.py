"""From runs to the figures that are printed: percentiles, and ratios over the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.jobs import Run


@dataclass(frozen=True)
class Spread:
    """The median over the rounds, with the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least ``percent`` per cent of them do not exceed."""
    if not values:
        raise ValueError("there is no percentile of nothing")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summarize(run: Run) -> dict[str, Any]:
    """A run as it is written down. Times are in seconds; a run that was not streamed has none of its tokens'."""
    summary: dict[str, Any] = {"tokens": run.tokens, "seconds": run.seconds}
    if run.processor is not None:
        summary["processor"] = run.processor
    for name, values in (("first", run.first), ("between", run.between)):
        if values:
            summary[name] = {"median": percentile(values, 50), "p99": percentile(values, 99)}
    return summary


#: What is compared: how to find it in a summary of a run (throughput is worked out).
MEASURES: dict[str, tuple[str, ...]] = {
    "throughput": ("throughput",),
    "seconds": ("seconds",),
    "processor": ("processor",),
    "first token, median": ("first", "median"),
    "first token, 99th percentile": ("first", "p99"),
    "between tokens, median": ("between", "median"),
    "between tokens, 99th percentile": ("between", "p99"),
}


def value(summary: Mapping[str, Any], measure: str) -> float | None:
    """One measure of a summary; None where the run did not have it."""
    if measure == "throughput":
        return float(summary["tokens"] / summary["seconds"])
    found: Any = summary
    for key in MEASURES[measure]:
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def ratio(rounds: Sequence[Mapping[str, Any]], measure: str) -> Spread | None:
    """A measure as a multiple of plain vLLM's in the same round, over the rounds; None where there is none.

    Each round is ``{"measured": summary, "plain": summary}``.
    """
    ratios = []
    for one in rounds:
        mine, plain = value(one["measured"], measure), value(one["plain"], measure)
        if mine is not None and plain:
            ratios.append(mine / plain)
    return Spread.of(ratios) if ratios else None


def absolute(rounds: Sequence[Mapping[str, Any]], measure: str, who: str) -> float | None:
    """The median over the rounds of a measure of ``"measured"`` or of ``"plain"``."""
    values = [found for one in rounds if (found := value(one[who], measure)) is not None]
    return statistics.median(values) if values else None
