"""Every row of docs/locations.md, run in a block: its shape, and its values where HuggingFace has a module for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Engines
from reference import close, reference

PAGE = Path(__file__).parent.parent / "docs" / "locations.md"
PROMPT = "The capital of France is"
#: The page's sections that hold for each model.
SECTIONS = {
    "llama": ["Llama, Qwen3 and Qwen2-MoE", "With a dense MLP: Llama and Qwen3", "Weights"],
    "qwen3": ["Llama, Qwen3 and Qwen2-MoE", "With a dense MLP: Llama and Qwen3", "Qwen3", "Weights"],
    "qwen2_moe": ["Llama, Qwen3 and Qwen2-MoE", "Qwen2-MoE", "Weights"],
    "gpt2": ["GPT-2"],
}
SIZES: dict[str, dict[str, int]] = {
    "llama": {"n_heads": 2, "n_kv": 1, "d_mlp": 128},
    "qwen3": {"n_heads": 4, "n_kv": 2, "d_mlp": 128},
    "qwen2_moe": {"n_heads": 2, "n_kv": 2, "n_experts": 8, "d_shared": 128},
    "gpt2": {"n_heads": 2, "d_mlp": 256},
}


@dataclass
class Row:
    """One row of a table."""

    what: str
    expression: str
    shape: str
    place: str


def rows_of_page() -> dict[str, list[Row]]:
    """The page's tables by the heading that they stand under."""
    sections: dict[str, list[Row]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        found = re.fullmatch(r"\| ([^`|]+) \| `([^|]+)` \| `(\[[^|]+\])` \| (?:`([^|]+)` )?\|", line)
        if found is not None:
            sections.setdefault(heading, []).append(Row(*(part or "" for part in found.groups())))
        elif line.startswith("|") and heading in {name for names in SECTIONS.values() for name in names}:
            assert line.startswith(("| What ", "| ---")), f"not a row: {line}"
    return sections


def test_every_table_of_the_page_is_run() -> None:
    assert rows_of_page().keys() == {name for names in SECTIONS.values() for name in names}
    assert sum(map(len, rows_of_page().values())) > 60


@pytest.mark.parametrize("name", SECTIONS)
def test_every_row_is_there_with_its_shape(engines: Engines, name: str) -> None:
    model, expected = engines.get(name, "sync"), reference(Engines.path(name))
    sections = rows_of_page()
    rows = [row for section in SECTIONS[name] for row in sections[section]]
    # `pos` is not as long as anything else is wide.
    ids = expected.encode(PROMPT)
    sizes = {"pos": len(ids), "d_model": 64, "d_head": 32, "vocab": 49152, **SIZES[name]}
    expressions = [row.expression for row in rows]
    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for expression in expressions:
            with tracer.invoke(PROMPT):
                names: dict[str, Any] = {"model": model}
                if "block" in expression:
                    names["block"] = model.transformer.h[1]
                elif "layer" in expression:
                    names["layer"] = model.model.layers[1]
                value = eval(expression, names)
                shape = list(value.shape).save()
                numbers = (value if value.numel() < 100_000 else value.flatten()[:10]).clone().save()
    places = sorted({row.place for row in rows if row.place})
    theirs = expected.module_outputs(ids, places)
    for row, mine, values in zip(rows, shape, numbers, strict=True):
        dims = eval(row.shape, {}, sizes)
        assert mine == dims, f"{row.what}: {row.expression} has shape {mine}, the page says {row.shape} = {dims}"
        if row.place:
            try:
                close(values.reshape(theirs[row.place].shape), theirs[row.place])
            except AssertionError as error:
                raise AssertionError(f"{row.what}: {row.expression} is not {row.place}: {error}") from None


def test_the_listing_on_the_page_is_what_is_printed(engines: Engines) -> None:
    model = engines.get("llama", "sync")
    assert repr(model.model.layers[1].self_attn.source) in PAGE.read_text()
