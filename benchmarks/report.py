"""Tables of results, in Markdown: ``python -m benchmarks.report benchmarks/results/cpu.json``.

Ratios are to plain vLLM in the same round: the median over the rounds, with the lowest and the highest. Absolute times
and speeds are printed only of a run on a GPU: those of a shared CPU say little about any other machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.statistics import Spread, absolute, ratio

SWEEP = "sweep"
Rounds = Sequence[Mapping[str, Any]]


def report(results: Mapping[str, Any]) -> str:
    """All tables of one file of results."""
    sections = [
        _table("Tokens per second, as a multiple of plain vLLM's (more is better)", results, _spread("throughput")),
        _sweeps(results),
        _table(
            "Processor time of all processes, as a multiple of plain vLLM's (less is better)",
            results,
            _spread("processor"),
        ),
        _table(
            "Time to the first token, as a multiple of plain vLLM's: median, 99th percentile (less is better)",
            results,
            _pair("first token"),
        ),
        _table(
            "Time between tokens, as a multiple of plain vLLM's: median, 99th percentile (less is better)",
            results,
            _pair("between tokens"),
        ),
    ]
    if results["settings"].get("absolute"):
        sections += [
            _table("Tokens per second, and plain vLLM's", results, _absolute("throughput", 1, ".0f")),
            _table(
                "Time to the first token in milliseconds, and plain vLLM's: median",
                results,
                _absolute("first token, median", 1e3, ".1f"),
            ),
            _table("The same: 99th percentile", results, _absolute("first token, 99th percentile", 1e3, ".1f")),
            _table(
                "Time between tokens in milliseconds, and plain vLLM's: median",
                results,
                _absolute("between tokens, median", 1e3, ".1f"),
            ),
            _table("The same: 99th percentile", results, _absolute("between tokens, 99th percentile", 1e3, ".1f")),
        ]
    return "\n\n".join(section for section in sections if section)


def describe(results: Mapping[str, Any]) -> str:
    """The machine and the settings, in a paragraph."""
    machine, settings = results["machine"], results["settings"]
    where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    engines = f"plain vLLM {'eager' if settings['plain_eager'] else 'with its defaults'}"
    whole = "" if results.get("finished") else " The run was cut short."
    if not machine["gpus"]:
        whole = f" Load of the machine when the run began: {machine['load']:.1f}.{whole}"
    return (
        f"{where}; vLLM {machine['vllm']}, torch {machine['torch']}, Python {machine['python']}. "
        f"{settings['model']}, {engines}; prompts of {settings['prompt_tokens']} tokens, {settings['new_tokens']} new "
        f"tokens, {settings['rounds']} rounds.{whole}"
    )


def _spread(measure: str) -> Callable[[Rounds], str]:
    return lambda rounds: _with_range(ratio(rounds, measure))


def _with_range(found: Spread | None) -> str:
    return "" if found is None else f"{found.median:.2f} ({found.lowest:.2f} to {found.highest:.2f})"


def _pair(measure: str) -> Callable[[Rounds], str]:
    def cell(rounds: Rounds) -> str:
        median, high = ratio(rounds, f"{measure}, median"), ratio(rounds, f"{measure}, 99th percentile")
        return "" if median is None or high is None else f"{median.median:.2f}, {high.median:.2f}"

    return cell


def _absolute(measure: str, factor: float, form: str) -> Callable[[Rounds], str]:
    def cell(rounds: Rounds) -> str:
        found = [absolute(rounds, measure, who) for who in ("measured", "plain")]
        return ", ".join("" if value is None else format(value * factor, form) for value in found).strip(", ")

    return cell


def _table(title: str, results: Mapping[str, Any], cell: Callable[[Rounds], str]) -> str:
    """One row for each workload of each package, one column for each number of requests; empty without a figure."""
    levels = results["settings"]["requests"]
    rows = []
    for who, workloads in results["results"].items():
        for workload, found in workloads.items():
            cells = [cell(found[str(level)]) if found.get(str(level)) else "" for level in levels]
            if workload != SWEEP and any(cells):
                rows.append([workload if who == "nnsight_async" else f"{who}: {workload}", *cells])
    if not rows:
        return ""
    heads = ["requests in flight", *map(str, levels)]
    lines = [heads, ["---", *["---:"] * len(levels)], *rows]
    return f"{title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sweeps(results: Mapping[str, Any]) -> str:
    """One line for each package's sweep."""
    settings, lines = results["settings"], []
    for who, workloads in results["results"].items():
        for count, rounds in workloads.get(SWEEP, {}).items():
            found = ratio(rounds, "seconds")
            if found is None:
                continue
            line = f"| {who} | {count} | {_with_range(found)} | {_with_range(ratio(rounds, 'processor'))} |"
            if settings.get("absolute"):
                mine, plain = absolute(rounds, "seconds", "measured"), absolute(rounds, "seconds", "plain")
                line += f" {mine:.2f}, {plain:.2f} |"
            lines.append(line)
    if not lines:
        return ""
    head = "| sweep | prompts | time, as a multiple of plain vLLM's | processor time, likewise |"
    rule = "| --- | ---: | ---: | ---: |"
    if settings.get("absolute"):
        head, rule = head + " seconds, and plain vLLM's |", rule + " ---: |"
    title = f"A sweep of short prompts, one new token each, {settings['concurrency']} at once (less is better)"
    return f"{title}:\n\n" + "\n".join([head, rule, *lines])


def fill_in(page: str, name: str, results: Mapping[str, Any]) -> str:
    """A page with the tables of results put where it has ``<!-- name -->`` and ``<!-- end -->``.

    Raises:
        ValueError: it has no such place.
    """
    mark = f"<!-- {name} -->\n"
    before, found, rest = page.partition(mark)
    _, end, after = rest.partition("<!-- end -->")
    if not (found and end):
        raise ValueError(f"the page has no place for {name}: {mark.strip()} and <!-- end -->")
    return f"{before}{mark}{describe(results)}\n\n{report(results)}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.run has written")
    parser.add_argument("--into", type=Path, help="put them into this page, where it names the file, and print nothing")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    if arguments.into is not None:
        arguments.into.write_text(fill_in(arguments.into.read_text(), arguments.results.as_posix(), results))
        return
    print(f"{describe(results)}\n\n{report(results)}")


if __name__ == "__main__":
    main()
