"""What a person says and hears of the tiers: locations to have graphs for, and how the steps were run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nnsight_async.errors import ArgumentError, LocationError
from nnsight_async.protocol import TierCounts
from nnsight_async.tree import describe

_SIDES = {"output": "out", "input": "in", "inputs": "in"}


@dataclass(frozen=True)
class TappedGraphs:
    """Captured graphs that break at the same locations.

    Attributes:
        locations: where they break (``model.layers.10.output``).
        copied: where they leave a copy for ``tracer.cache`` instead.
        tokens: the numbers of tokens a step that there is one for.
        prompts: whether they are for steps with prompts in them, not for steps of one token a request.
    """

    locations: tuple[str, ...]
    copied: tuple[str, ...]
    tokens: tuple[int, ...]
    prompts: bool


@dataclass(frozen=True)
class TierStats:
    """How the steps of an engine were run so far, each counted once.

    Attributes:
        whole: in one of vLLM's whole graphs: nobody looked at a location of the forward pass.
        plain: as vLLM runs what it has no whole graph for, prompts above all; nobody looked.
        tapped: in a graph that breaks where somebody looked.
        eager: by Python, operation by operation.
        again: how many of the tapped steps were run a second time, eagerly: a block looked where it never had before.
        captured: how many tapped graphs were captured, those included that have been let go since.
        capture_seconds: how long that took.
        refused: how many could not be captured.
        graphs: the tapped graphs that there are.
    """

    whole: int
    plain: int
    tapped: int
    eager: int
    again: int
    captured: int
    capture_seconds: float
    refused: int
    graphs: tuple[TappedGraphs, ...]


def tier_stats(counts: TierCounts) -> TierStats:
    """What a worker has counted, as a person reads it."""
    graphs = tuple(
        TappedGraphs(
            tuple(describe(path, side) for path, side, *rest in taps if not rest),  # type: ignore[arg-type]
            tuple(describe(path, side) for path, side, *rest in taps if rest),  # type: ignore[arg-type]
            tuple(tokens),
            prompts,
        )
        for taps, tokens, prompts in counts.graphs
    )
    return TierStats(
        counts.whole,
        counts.plain,
        counts.tapped,
        counts.eager,
        counts.again,
        counts.captured,
        counts.capture_seconds,
        counts.refused,
        graphs,
    )


def find_taps(taps: Any, paths: Iterable[str]) -> list[list[tuple[str, str]]]:
    """The locations that each of ``taps`` names, as module paths and sides.

    Args:
        taps: one entry for each set of locations to have graphs for: a location, a pattern in which ``*`` stands for
            one name (``model.layers.*.output``), or a collection of those.
        paths: the paths of the model's modules.

    Raises:
        ArgumentError: ``taps`` is no list, or an entry is neither a string nor a collection of them.
        LocationError: a location or pattern that no module has.
    """
    if isinstance(taps, str) or not isinstance(taps, Sequence):
        raise ArgumentError(
            f'taps is a list of locations or of sets of them (["model.layers.10.output"]), not {taps!r}'
        )
    known = list(paths)
    found = []
    for entry in taps:
        names = [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, Iterable) else [entry]
        if not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"taps has {entry!r} in it, which is no location and no collection of locations")
        found.append(sorted({key for name in names for key in _matching(name, known)}))
    return found


def _matching(name: str, paths: Sequence[str]) -> list[tuple[str, str]]:
    path, _, side = name.rpartition(".")
    if side not in _SIDES:
        raise LocationError(f"{name!r} in taps is no location: it ends in .output, .input or .inputs")
    pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
    matching = [(known, _SIDES[side]) for known in paths if pattern.fullmatch(known)]
    if not matching:
        raise LocationError(f"no module of the model has the path {path!r}, in taps (in which * is one name)")
    return matching
