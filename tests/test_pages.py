"""The snippets of the two pages that define the behaviour, run as written with our import and SmolLM2.

They stand in ``snippets/``, one file each. ``VLLM("Qwen/Qwen3-8B", ...)`` gives the run's own engine; one of them is
also run as a script of its own, at module level and without ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINE, Engines
from reference import close, reference

import nnsight_async
from nnsight_async import VLLM
from nnsight_async.errors import LoopCutShortWarning

SNIPPETS = Path(__file__).parent / "snippets"
WIDTH, INTERMEDIATE, LAYERS = 576, 1536, 30


@pytest.fixture
def run(engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a snippet; ``sizes`` puts our model's sizes in the place of the page's."""

    def page_model(name: str, **arguments: Any) -> VLLM:
        assert arguments == {"dispatch": True}
        return engines.get({"Qwen/Qwen3-8B": "smollm2", "Qwen/Qwen1.5-MoE-A2.7B": "qwen2_moe"}[name], "sync")

    def run_snippet(name: str, sizes: dict[str, str] | None = None) -> dict[str, Any]:
        path = SNIPPETS / f"{name}.py"
        if sizes:
            text, path = path.read_text(), tmp_path / path.name
            for theirs, ours in sizes.items():
                assert theirs in text
                text = text.replace(theirs, ours)
            path.write_text(text)
        return runpy.run_path(str(path))

    monkeypatch.setattr(nnsight_async, "VLLM", page_model, raising=False)
    return run_snippet


def test_one_location(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("capture_one_location")
    expected = reference(Engines.path("smollm2"))
    ids = expected.encode("The capital of France is")
    close(names["resid_post"], expected.hidden_states(ids)[11])


def test_several_locations(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("capture_several_locations")
    expected = reference(Engines.path("smollm2"))
    ids = expected.encode("The capital of France is")
    outputs = expected.module_outputs(ids, ["model.layers.10.self_attn", "model.layers.10.mlp"])
    close(names["attn_out"], outputs["model.layers.10.self_attn"])
    close(names["mlp_out"], outputs["model.layers.10.mlp"])
    assert names["mlp_act"].shape == (5, INTERMEDIATE)


def test_every_layer(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("capture_every_layer")
    expected = reference(Engines.path("smollm2"))
    states = expected.hidden_states(expected.encode("The capital of France is"))[1:]
    assert len(names["resid"]) == LAYERS
    for actual, state in zip(names["resid"], states, strict=True):
        close(actual, state)


def test_a_cache(run: Callable[..., dict[str, Any]]) -> None:
    names = run("capture_cache", {"range(0, 36, 12)": "range(0, 30, 12)"})
    expected = reference(Engines.path("smollm2"))
    paths = [f"model.layers.{number}.mlp" for number in (0, 12, 24)]
    assert list(names["cache"].keys()) == [f"model.{path}" for path in paths]
    for path, output in expected.module_outputs(expected.encode("The capital of France is"), paths).items():
        close(names["cache"][f"model.{path}"].output, output)


def test_while_generating(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("capture_while_generating")
    assert len(names["resid"]) == 8
    assert names["resid"][0].shape == (WIDTH,)
    assert names["out"].outputs[0].text.startswith(" Paris")


def test_many_prompts(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("capture_many_prompts")
    expected = reference(Engines.path("smollm2"))
    assert len(names["resid"]) == len(names["token"]) == 3
    for prompt, rows, token in zip(names["prompts"], names["resid"], names["token"], strict=True):
        ids = expected.encode(prompt)
        close(rows, expected.hidden_states(ids)[11])
        assert token.tolist() == expected.greedy(ids, 1)


def test_fused_projections(run: Callable[..., dict[str, Any]]) -> None:
    names = run("capture_fused_projections", {"n_heads, n_kv, d = 32, 8, 128": "n_heads, n_kv, d = 9, 3, 64"})
    expected = reference(Engines.path("smollm2"))
    at = "model.layers.10."
    outputs = expected.module_outputs(
        expected.encode("The capital of France is"), [f"{at}self_attn.v_proj", f"{at}mlp.gate_proj"]
    )
    close(names["v"], outputs[f"{at}self_attn.v_proj"])
    close(names["gate"], outputs[f"{at}mlp.gate_proj"])


def test_moe_routing(run: Callable[..., dict[str, Any]]) -> None:
    names = run("capture_moe_routing", {"layers[10]": "layers[2]"})
    expected = reference(Engines.path("qwen2_moe"))
    places = [f"model.layers.2.mlp.{name}" for name in ("gate", "experts", "shared_expert", "shared_expert_gate")]
    outputs = expected.module_outputs(expected.encode("The capital of France is"), places)
    gate, experts, shared, weight = (outputs[place] for place in places)
    close(names["router_logits"], gate)
    # vLLM's experts are all of the layer's, the shared one with them.
    close(names["experts_out"], experts + weight.sigmoid() * shared)


def test_text(run: Callable[[str], dict[str, Any]]) -> None:
    out = run("generation_text")["out"]
    expected = reference(Engines.path("smollm2")).greedy("The capital of France is", 32)
    assert list(out.outputs[0].token_ids) == expected[: len(out.outputs[0].token_ids)]
    assert out.outputs[0].finish_reason in ("length", "stop")


def test_without_a_block(run: Callable[[str], dict[str, Any]]) -> None:
    outputs = run("generation_without_a_block")["outputs"]
    for output, prompt in zip(outputs, ["The capital of France is", "The capital of Japan is"], strict=True):
        assert list(output.outputs[0].token_ids) == reference(Engines.path("smollm2")).greedy(prompt, 8)


def test_logprobs(run: Callable[[str], dict[str, Any]]) -> None:
    out = run("generation_logprobs")["out"].outputs[0]
    expected = reference(Engines.path("smollm2"))
    ids = expected.encode("The capital of France is")
    every = expected.logits([*ids, *out.token_ids[:-1]]).log_softmax(-1)[len(ids) - 1 :]
    assert len(out.logprobs) == 4
    for token, top, row in zip(out.token_ids, out.logprobs, every, strict=True):
        assert len(top) == 3
        assert top[token].logprob == pytest.approx(row[token].item(), abs=1e-3)


def test_logits_and_the_draw(run: Callable[[str], dict[str, Any]]) -> None:
    with pytest.warns(LoopCutShortWarning) as caught:
        steps = run("generation_logits_and_draw")["steps"]
    assert len(caught) == 1
    assert [step for step, *_ in steps] == [0, 1, 2, 3, 4, 5]
    expected = reference(Engines.path("smollm2"))
    ids = expected.encode("The capital of France is")
    drawn = [token for _, token, *_ in steps]
    every = expected.logits([*ids, *drawn[:-1]]).softmax(-1)[len(ids) - 1 :]
    for (_, token, probability, greedy), row in zip(steps, every, strict=True):
        assert probability == pytest.approx(row[token].item(), abs=2e-3)
        assert greedy == int(row.argmax())


def test_forcing_the_draw(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("generation_forcing_the_draw")
    out, berlin = names["out"].outputs[0], names["berlin"]
    expected = reference(Engines.path("smollm2"))
    ids = expected.encode("The capital of France is")
    assert list(out.token_ids) == [berlin, *expected.greedy([*ids, berlin], 7)]
    assert out.text.startswith(" Berlin")


def test_stopping_early(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("generation_stopping_early")
    assert names["ids"] == reference(Engines.path("smollm2")).greedy("The capital of France is", 3)


def test_several_sequences(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("generation_several_sequences")
    outputs = names["out"].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert names["first"] == [output.token_ids[0] for output in outputs]
    assert all(len(output.token_ids) == 8 for output in outputs)


def test_several_prompts(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("generation_several_prompts")
    cold, hot = names["cold"].outputs[0], names["hot"].outputs[0]
    assert list(cold.token_ids) == reference(Engines.path("smollm2")).greedy("The capital of France is", 8)
    assert len(hot.token_ids) <= 8
    assert list(hot.token_ids) != list(cold.token_ids)


def test_prompt_forms(run: Callable[[str], dict[str, Any]]) -> None:
    names = run("generation_prompt_forms")
    assert names["a"].outputs[0].text == names["b"].outputs[0].text
    assert names["a"].outputs[0].text.startswith(" Paris")


@pytest.mark.slow
def test_a_snippet_as_a_script_of_its_own(tmp_path: Path) -> None:
    """At module level, no main guard, its own engine; and nothing is left when it has ended without a close."""
    text = (SNIPPETS / "capture_while_generating.py").read_text()
    arguments = ", ".join(f"{name}={value!r}" for name, value in ENGINE.items())
    text = text.replace('"Qwen/Qwen3-8B", dispatch=True', f"{Engines.path('smollm2')!r}, dispatch=True, {arguments}")
    script = tmp_path / "script.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("8 torch.Size([576]) ' Paris"), done.stdout
