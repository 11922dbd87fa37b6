"""A plot of results: ``python -m benchmarks.plot benchmarks/results/cpu.json``; needs the extra ``bench``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import SWEEP, describe
from benchmarks.statistics import ratio


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw throughput as a multiple of plain vLLM's, by workload and number of requests, to ``path``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"  # the same results give the same file
    from matplotlib import pyplot

    levels = results["settings"]["requests"]
    bars: list[tuple[str, dict[int, Any]]] = []
    for who, workloads in results["results"].items():
        for workload, found in workloads.items():
            if workload != SWEEP:
                spreads = {n: ratio(found[str(n)], "throughput") for n in levels if found.get(str(n))}
                bars.append((workload if who == "nnsight_async" else f"{who}\n{workload}", spreads))
    figure, axes = pyplot.subplots(figsize=(max(8.0, 1.1 * len(bars)), 4.5), layout="constrained")
    width = 0.8 / max(1, len(levels))
    for place, level in enumerate(levels):
        there = [(x, spreads[level]) for x, (_, spreads) in enumerate(bars) if spreads.get(level) is not None]
        if not there:
            continue
        below = [found.median - found.lowest for _, found in there]
        above = [found.highest - found.median for _, found in there]
        axes.bar(
            [x + (place - (len(levels) - 1) / 2) * width for x, _ in there],
            [found.median for _, found in there],
            width,
            yerr=[below, above],
            capsize=2,
            label=str(level),
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], rotation=30, ha="right")
    axes.set_ylabel("tokens per second / plain vLLM's")
    axes.margins(y=0.2)
    axes.legend(title="requests in flight", ncols=len(levels), loc="upper right")
    figure.suptitle(describe(results), fontsize=7, wrap=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what benchmarks.run has written")
    arguments = parser.parse_args()
    path = arguments.results.with_suffix(".svg")
    plot(json.loads(arguments.results.read_text()), path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
