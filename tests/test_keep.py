"""What is kept is what was read, without the user writing .clone().

On a GPU vLLM's fused norm writes over what a layer returned. Its CPU build computes the norm out of place, so here the
blocks do to the norm's inputs, which are that memory, what the kernel does; rotary embeddings and the sampler write
over theirs on every device. Without the copying in ``worker/keep.py`` most of these tests fail.
"""

from __future__ import annotations

import torch

from nnsight_async import VLLM

PROMPT = "The capital of France is"


def _norms(model):
    """The norm that is called next after each layer."""
    return [*(layer.input_layernorm for layer in model.model.layers[1:]), model.model.norm]


def _overwrite(norm):
    """What the fused norm does to its inputs, the hidden states and the residual, where it is in place."""
    for tensor in norm.inputs[0]:
        tensor.fill_(-1.0)


def test_saved_directly_at_every_layer(smol: VLLM) -> None:
    model = smol
    for index, norm in enumerate(_norms(model)):
        layer = model.model.layers[index]
        with model.trace(PROMPT, temperature=0.0, max_tokens=2):
            raw = layer.output[1].save()
            copy = layer.output[1].clone().save()
            _overwrite(norm)
        assert torch.equal(raw, copy), index


def test_in_a_list_at_every_layer(smol: VLLM) -> None:
    model = smol
    norms = _norms(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        raw, copies = list().save(), list().save()
        for layer, norm in zip(model.model.layers, norms, strict=True):
            raw.append(layer.output[1])
            copies.append(layer.output[1].clone())
            _overwrite(norm)
    assert len(raw) == 30
    for index, (a, b) in enumerate(zip(raw, copies, strict=True)):
        assert torch.equal(a, b), index


def test_what_the_engine_itself_writes_over(model: VLLM) -> None:
    attention = model.model.layers[1].self_attn
    with model.trace(PROMPT, temperature=0.7, seed=1, repetition_penalty=1.3, max_tokens=2):
        raw, copies = list().save(), list().save()
        raw.append(attention.q_norm.output)  # rotated in place
        copies.append(attention.q_norm.output.clone())
        raw.append(model.logits_processor.output)  # penalties and temperature are applied in place
        copies.append(model.logits_processor.output.clone())
        raw.append(model.logits)
        copies.append(model.logits.clone())
    for index, (a, b) in enumerate(zip(raw, copies, strict=True)):
        assert torch.equal(a, b), index


def test_an_edit_of_the_blocks_own_afterwards(model: VLLM) -> None:
    layer = model.model.layers[1]
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        before = layer.mlp.output.save()
        copy = layer.mlp.output.clone().save()
        layer.output[0][:] += 1.0  # the same memory, a location later
    assert torch.equal(before, copy)


def test_views_of_what_was_read(smol: VLLM) -> None:
    model = smol
    norms = _norms(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        raw, copies = list().save(), list().save()
        for layer, norm in zip(model.model.layers, norms, strict=True):
            raw.append(layer.output[1][-1, :64].view(8, 8).T)
            copies.append(layer.output[1][-1, :64].view(8, 8).T.clone())
            _overwrite(norm)
    for index, (a, b) in enumerate(zip(raw, copies, strict=True)):
        assert torch.equal(a, b), index


def test_in_a_dict_in_a_list_and_in_a_tuple(model: VLLM) -> None:
    norms = _norms(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        raw, copies = list().save(), list().save()
        for layer, norm in zip(model.model.layers, norms, strict=True):
            raw.append({"stream": layer.output, "last": (layer.output[1][-1], "row")})
            copies.append({"stream": [t.clone() for t in layer.output], "last": layer.output[1][-1].clone()})
            _overwrite(norm)
    for a, b in zip(raw, copies, strict=True):
        assert torch.equal(a["stream"][1], b["stream"][1])
        assert torch.equal(a["last"][0], b["last"])


def test_under_a_loop_over_steps(model: VLLM) -> None:
    norms = _norms(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        raw, copies = list().save(), list().save()
        for _ in tracer.iter[:5]:
            for layer, norm in zip(model.model.layers, norms, strict=True):
                raw.append(layer.output[1])
                copies.append(layer.output[1].clone())
                _overwrite(norm)
            raw.append(model.logits)
            copies.append(model.logits.clone())
    assert len(raw) == 25
    for a, b in zip(raw, copies, strict=True):
        assert torch.equal(a, b)


def test_put_into_a_slot_that_was_there_before(model: VLLM) -> None:
    norms = _norms(model)
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        raw = ([None] * 4).save()
        copies = {}.save()
        for index, layer in enumerate(model.model.layers):
            raw[index] = layer.output[1]
            copies[index] = layer.output[1].clone()
            _overwrite(norms[index])
    for index in range(4):
        assert torch.equal(raw[index], copies[index]), index


def test_read_early_and_saved_late(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        early = model.model.layers[0].output[1]
        copy = early.clone().save()
        _overwrite(model.model.layers[1].input_layernorm)
        late = early.save()
        part = early[1:3].save()
    assert torch.equal(late, copy)
    assert torch.equal(part, copy[1:3])


def test_in_the_middle_of_an_expression(model: VLLM) -> None:
    layers = model.model.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        first = layers[0].output[1].clone()
        third = layers[2].output[1].clone()
        expected = (third - first).save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        difference = (layers[0].output[1] - layers[2].output[1]).save()
        pair = torch.stack([layers[3].output[0], layers[3].output[1]]).save()
    assert torch.equal(difference, -expected)
    assert pair.shape == (2, 5, 64)


def test_a_view_in_the_middle_of_an_expression(model: VLLM) -> None:
    layers = model.model.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        rows = [layers[0].output[1][-1].clone(), layers[2].output[1][-1].clone()]
        expected = torch.stack(rows).save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        stacked = torch.stack([layers[0].output[1][-1], layers[2].output[1][-1]]).save()
    assert torch.equal(stacked, expected)


def _last_rows(first, second):
    row = first.output[1][-1]
    other = second.output[1][-1]
    return row, other


def test_in_the_variables_of_a_helper_function(model: VLLM) -> None:
    layers = model.model.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        a = layers[0].output[1][-1].clone().save()
        b = layers[2].output[1][-1].clone().save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        c, d = _last_rows(layers[0], layers[2])
        both = (c, d).save()
    assert torch.equal(both[0], a)
    assert torch.equal(both[1], b)


def test_a_tensor_that_the_block_changes_itself_arrives_as_it_was_left(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        total = torch.zeros(64).save()
        parts = list().save()
        for _ in tracer.iter[:4]:
            row = sum(model.model.layers[1].output)[-1]
            total += row
            parts.append(row)
    assert torch.allclose(total, sum(parts))
    assert len(parts) == 4


def test_a_view_of_an_earlier_value_beside_a_later_one(model: VLLM) -> None:
    layers = model.model.layers
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        rows = [layers[0].output[1][-1].clone(), layers[2].output[1][-1].clone()]
        expected = torch.stack(rows).save()
    with model.trace(PROMPT, temperature=0.0, max_tokens=2):
        early = layers[0].output
        stacked = torch.stack([early[1][-1], layers[2].output[1][-1]]).save()
        rest = [layer.output[1][-1] for layer in layers[3:]].save()
    assert torch.equal(stacked, expected)
    assert rest[0].shape == (64,)


def _double(tensor):
    tensor.mul_(2)


def test_a_tensor_that_a_helper_function_changes(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        ones = torch.ones(2).save()
        for _ in tracer.iter[:3]:
            _double(ones)
    assert ones.tolist() == [8.0, 8.0]


class _Box:
    """An object that reaches a saved tensor in its own way."""

    def __init__(self, tensor):
        self.tensor = tensor

    def double(self):
        self.tensor.mul_(2)


def test_a_tensor_that_is_changed_where_the_block_does_not_show_it(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        boxed, listed = torch.ones(2).save(), [torch.ones(2)].save()
        box = _Box(boxed)

        def double_first():
            listed[0].mul_(2)

        for _ in tracer.iter[:3]:
            box.double()
            double_first()
    assert boxed.tolist() == [8.0, 8.0]
    assert listed[0].tolist() == [8.0, 8.0]


def test_a_tensor_that_is_changed_by_an_object_or_through_an_array(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        boxed = torch.ones(2).save()
        box = _Box(boxed)
        for _ in tracer.iter[:3]:
            box.double()
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        aliased = torch.ones(2).save()
        array = aliased.numpy()
        for _ in tracer.iter[:3]:
            array *= 2
    assert boxed.tolist() == [8.0, 8.0]
    assert aliased.tolist() == [8.0, 8.0]


def test_a_list_in_a_tuple_in_a_list_that_grows(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        inner = []
        outer = [(0, inner)].save()
        for step in tracer.iter[:3]:
            inner.append(step)
    assert outer == [(0, [0, 1, 2])]
