"""Which blocks may write into the model's memory, told from their text and from what they read."""

# ruff: noqa: E501
from __future__ import annotations

import functools
import math
import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nnsight_async import save
from nnsight_async.tracing import find_edits
from nnsight_async.tree import ModuleRef


class Probe:
    """A class of a user's own, with a method that may do anything."""

    layer = 3
    weight = torch.ones(2)

    def look(self, value: Any) -> Any:
        return value


def helper(value: Any) -> Any:
    return value


@functools.lru_cache
def cached_helper(value: Any) -> Any:
    return value


def _wrapped(text: str) -> str:
    return "if 1:\n" + "\n".join("    " + line for line in text.splitlines()) + "\n"


def _values() -> dict[str, Any]:
    model = ModuleRef(nn.Sequential(nn.Linear(2, 2)))
    return {
        "model": model,
        "tracer": model,
        "torch": torch,
        "F": torch.nn.functional,
        "relu": torch.relu,
        "relu_": torch.relu_,
        "math": math,
        "np": np,
        "operator": operator,
        "save": save,
        "probe": Probe(),
        "helper": helper,
        "cached_helper": cached_helper,
        "module": nn.ReLU(inplace=True),
        "partial": functools.partial(torch.relu_),
        "vector": torch.ones(2),
        "ids": [1, 2],
        "table": {"a": torch.ones(2)},
        "helpers": [helper],
        "names": SimpleNamespace(layer=3),
        "number": 3,
    }


def may_write(text: str) -> bool:
    return find_edits(_wrapped(text), None).possible(_values())


READS = [
    "for layer in model.layers:\n    top = model.logits_processor(model.lm_head, model.model.norm(sum(layer.output))).argmax(-1).save()",
    "strength = tracer.live('strength', 0.0).save()",
    "pass",
    "token = model.samples.item().save()",
    "hidden, residual = model.layers[3].output\nstream = (hidden + residual).save()",
    "stream = sum(model.layers[3].output).save()\nstream[0] = 0",
    "acts = [].save()\nfor layer in model.layers:\n    acts.append(sum(layer.output))",
    "acts = list().save()\nfor step in tracer.iter[:8]:\n    acts.append(model.layers[3].output[0][-1])",
    "acts = {}.save()\nfor i, layer in enumerate(model.layers):\n    acts[i] = layer.output[0]",
    "acts = save([])\nacts += [model.layers[3].output[0]]",
    "norms = [].save()\nfor step in tracer.all():\n    stream = sum(model.layers[3].output)\n    norms.append(stream[-1].norm())",
    "rows = torch.stack([a.output[0][-1] for a in model.layers]).save()",
    "total = 0\nfor layer in model.layers:\n    total += layer.output[0].norm()\ntotal = total.save()",
    "counts = {}.save()\nfor step in tracer.iter[:3]:\n    counts[step] = 0\n    counts[step] += 1",
    "model.logits[:, 2] = -torch.inf",
    "model.logits = model.logits * number",
    "logits = model.logits\nlogits.masked_fill_(logits < 0, -math.inf)",
    "model.samples = torch.full_like(model.samples, number)",
    "text = model.tokenizer.decode(model.samples[0]).save()\nif '.' in text:\n    tracer.stop()",
    "probs = F.softmax(model.logits, dim=-1).save()",
    "out = tracer.result.save()",
    "kept = relu(model.layers[3].output[0]).save()",
    "kept = (model.layers[3].output[0] @ vector).save()",
    "kept = (model.layers[probe.layer].output[0] * probe.weight).save()",
    "kept = (model.layers[names.layer].output[0] * table['a']).save()",
    "def norm(rows):\n    return rows.norm()\nkept = norm(model.layers[3].output[0]).save()",
    "kept = sorted([h.norm() for h in model.layers[3].output], key=lambda norm: -norm).save()",
    "import math as m\nkept = (model.layers[3].output[0] * m.sqrt(2)).save()",
    "own = model.layers[3].output[0].clone()\nown += 1\nown[0] = 2\nown.mul_(3)\nown = own.save()",
    "rows = model.layers[3].output[0].shape[0]\nrows += 1\nrows = rows.save()",
    "try:\n    model.layers[0].output\nexcept Exception as error:\n    told = type(error).__name__.save()",
    "args, kwargs = model.norm.inputs\nkept = args[0].mean(-1).save()",
    "ids.append(model.samples.item())\nkept = ids.save()",
    "print(f'{probe.layer} {model.layers[3].output[0].norm()}')",
    "with torch.no_grad():\n    kept = model.layers[3].output[0].relu().save()",
]

WRITES = [
    "model.layers[3].output[0] += vector",
    "model.layers[3].output[0][:] += vector",
    "model.layers[3].output = (vector, vector)",
    "model.layers[3].mlp.output[:, 7] = 0",
    "model.layers[3].input = vector",
    "model.layers[3].inputs = ((vector,), {})",
    "hidden = model.layers[3].output[0]\nhidden += vector",
    "hidden = model.layers[3].output[0]\nhidden.add_(1)",
    "hidden = model.layers[3].output[0].float()\nhidden[0] = 1",
    "hidden, residual = model.layers[3].output\nresidual[0] = 1",
    "for part in model.layers[3].output:\n    part *= 2",
    "parts = [h[-1] for h in model.layers[3].output]\nparts[0].zero_()",
    "acts = []\nacts.append(model.layers[3].output[0])\nacts[-1] += 1",
    "acts = {}\nacts['a'] = model.layers[3].output[0]\nacts['a'][0] = 1",
    "acts = [] + [model.layers[3].output[0]]\nfor act in acts:\n    act[0] = 1",
    "a, b = (number, model.layers[3].output[0])\nb[0] = 1",
    "if (h := model.layers[3].output[0]) is not None:\n    h[0] = 1",
    "torch.add(vector, 1, out=model.layers[3].output[0])",
    "torch.relu_(model.layers[3].output[0])",
    "relu_(model.layers[3].output[0])",
    "f = torch.relu_\nf(model.layers[3].output[0])",
    "f = model.layers[3].output[0].add_\nf(1)",
    "F.relu(model.layers[3].output[0], True)",
    "F.relu(model.layers[3].output[0], inplace=True)",
    "module(model.layers[3].output[0])",
    "partial(model.layers[3].output[0])",
    "kept = [*map(relu_, model.layers[3].output)]",
    "operator.iadd(model.layers[3].output[0], 1)",
    "model.layers[3].output[0].__iadd__(1)",
    "setattr(model.layers[3], 'output', vector)",
    "getattr(model.layers[3].output[0], 'zero_')()",
    "exec('model.layers[3].output = 1')",
    "helper(model.layers[3].output[0])",
    "helper(1)",  # it may know the model by itself
    "cached_helper(model.layers[3].output[0])",
    "f = helper\nf(model.layers[3].output[0])",
    "for f in helpers:\n    f(model.layers[3].output[0])",
    "kept = [*map(helper, model.layers[3].output)]",
    "probe.look(model.layers[3].output[0])",
    "probe.append(model.layers[3].output[0])",
    "names.kept = model.layers[3].output[0]",
    "def f(rows):\n    rows += 1\nf(model.layers[3].output[0])",
    "def f():\n    model.layers[3].output[0][:] = 0\nf()",
    "(lambda t: t.zero_())(model.layers[3].output[0])",
    "array = model.layers[3].output[0].numpy()\narray.sort()",
    "np.copyto(np.asarray(model.layers[3].output[0]), 0)",
    "model.layers[3].skip(vector)",
    "model.layers[3].forward(vector)",
    "model.head.weight[0] = 0",
    "model.head.weight.zero_()",
    "torch.ops.mine.write(model.layers[3].output[0])",
    "class Mine:\n    pass",
    "import somewhere\nkept = 1",
    "from torch.nn.init import zeros_\nzeros_(model.layers[3].output[0])",
    "match model.layers[3].output:\n    case (h, r):\n        h[0] = 1",
    "kept = +model.layers[3].output[0]\nkept[0] = 1",
]


@pytest.mark.parametrize("text", READS)
def test_a_block_that_only_reads(text: str) -> None:
    assert not may_write(text)


@pytest.mark.parametrize("text", WRITES)
def test_a_block_that_may_write(text: str) -> None:
    assert may_write(text)


def test_private_names_are_looked_up_as_python_stores_them() -> None:
    text = "kept = __mine(model.layers[3].output[0])"
    values = _values()
    assert find_edits(_wrapped(text), "Owner").possible({**values, "_Owner__mine": helper})
    assert not find_edits(_wrapped(text), "Owner").possible({**values, "_Owner__mine": torch.relu})
