"""What several blocks of a step keep of one location is copied together, without an engine."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blocks import Batch

from nnsight_async.worker import slabs
from nnsight_async.worker.block import Block
from nnsight_async.worker.staging import HostStaging, Piece, _runs, gather

KEEP = """
kept = list().save()
for _ in tracer.iter[:]:
    kept.append(model.a.output)
"""


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    batch.close()


def _value(rows: int, width: int = 4) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).reshape(rows, width) + 1


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor shows."""
    return tensor.untyped_storage().data_ptr()


def _ended(blocks: list[Block]) -> list[Any]:
    return [block.failure for block in blocks]


def test_rows_of_several_requests_in_one_piece(batch: Batch) -> None:
    rows = {"r2": (6, 9), "r0": (0, 2), "r1": (3, 6)}  # row 2 is nobody's, the order is not that of the rows
    blocks = {name: batch.add(name, KEEP) for name in rows}
    whole = _value(12)
    expected = {name: whole[start:stop].clone() for name, (start, stop) in rows.items()}
    batch.step({"a": whole}, rows, 10)  # two rows more than tokens: the engine pads
    for name, block in blocks.items():
        (kept,) = block.saved["kept"]
        assert torch.equal(kept, expected[name]), name
    assert len({_memory(block.saved["kept"][0]) for block in blocks.values()}) == 1
    assert whole.eq(-1).all()


def test_a_tuple_and_parts_of_its_tensors(batch: Batch) -> None:
    texts = {
        "whole": "x = model.a.output.save()\nmodel.b.output",
        "last": "x = model.a.output[1][-1].save()\nmodel.b.output",
        "turned": "x = model.a.output[0].T.save()\nmodel.b.output",
        "longer": "x = model.a.output[0]\nx.unsqueeze_(0)\nx.save()\nmodel.b.output",
        "bits": "x = model.a.output[0].view(torch.int32).save()\nmodel.b.output",
        "none": "x = (model.a.output[0] + model.a.output[1]).save()\nmodel.b.output",
    }
    blocks = {name: batch.add(name, text) for name, text in texts.items()}
    rows = {name: (2 * index, 2 * index + 2) for index, name in enumerate(texts)}
    pair = (_value(12), _value(12) * 100)
    copies = {name: (pair[0][a:b].clone(), pair[1][a:b].clone()) for name, (a, b) in rows.items()}
    assert _ended(batch.step({"a": pair, "b": _value(12)}, rows, 12)) == [None] * 6
    x = {name: block.saved["x"] for name, block in blocks.items()}
    assert all(map(torch.equal, x["whole"], copies["whole"]))
    assert torch.equal(x["last"], copies["last"][1][-1])
    assert torch.equal(x["turned"], copies["turned"][0].T)
    assert torch.equal(x["longer"], copies["longer"][0][None])
    assert torch.equal(x["bits"], copies["bits"][0].view(torch.int32))
    assert torch.equal(x["none"], sum(copies["none"]))


def test_edits_are_kept_by_those_who_made_them_and_reach_no_neighbour(batch: Batch) -> None:
    edit = "x = model.a.output.save()\nx *= 10\nmodel.b.output"
    keep = "x = model.a.output.save()\nmodel.b.output"
    blocks = [batch.add("r0", keep), batch.add("r1", edit), batch.add("r2", keep)]
    whole = _value(3)
    expected = whole.clone() * torch.tensor([[1.0], [10.0], [1.0]])
    batch.step({"a": whole, "b": _value(3)}, {f"r{i}": (i, i + 1) for i in range(3)}, 3)
    for index, block in enumerate(blocks):
        assert torch.equal(block.saved["x"], expected[index : index + 1])


@pytest.mark.parametrize("kind", ["no rows", "one memory", "stretched"])
def test_memory_that_several_blocks_come_to_is_kept_as_each_saw_it(batch: Batch, kind: str) -> None:
    """A tensor without rows, rows of two tensors in one memory, and rows that are all the same one."""
    text = "x = model.a.output.save()\ny = model.a.output\ny.mul_(2)\ndel y\nmodel.b.output"
    if kind == "one memory":
        text = "x, y = model.a.output\nx.save()\ny.mul_(2)\ndel y\nmodel.b.output"
    blocks = [batch.add(f"r{i}", text) for i in range(3)]
    base = _value(3)
    value: Any = {
        "no rows": base[:2],
        "one memory": (base, base.T[:3]),
        "stretched": base[:1].as_strided((3, 4), (0, 1)),
    }
    shown = value[kind]
    copies, after = [], base.clone()
    for index in range(3):
        view = {"no rows": after[:2], "one memory": (after, after.T[:3]), "stretched": after[:1]}[kind]
        if isinstance(view, tuple):
            view[1][index].mul_(2)
            copies.append(view[0][index : index + 1].clone())
        else:
            copies.append(view.mul_(2).clone())
    batch.step({"a": shown, "b": _value(3)}, {f"r{i}": (i, i + 1) for i in range(3)}, 3)
    for index, block in enumerate(blocks):
        assert block.failure is None
        assert torch.equal(block.saved["x"], copies[index]), index


def test_little_of_a_location_is_kept_without_the_rest(batch: Batch) -> None:
    blocks = [batch.add(f"r{i}", KEEP if i == 3 else "model.a.output\nmodel.b.output") for i in range(8)]
    last = [batch.add(f"l{i}", "x = model.b.output[-1].save()\nmodel.c.output") for i in range(3)]
    rows = {f"r{i}": (i, i + 1) for i in range(8)} | {f"l{i}": (8 + 9 * i, 17 + 9 * i) for i in range(3)}
    a, b = _value(35), _value(35)
    one, rest = a[3:4].clone(), [b[16 + 9 * i].clone() for i in range(3)]
    batch.step({"a": a, "b": b, "c": _value(35)}, rows, 35)
    (kept,) = blocks[3].saved["kept"]
    assert torch.equal(kept, one)
    assert kept.untyped_storage().nbytes() == 16
    for block, row in zip(last, rest, strict=True):
        assert torch.equal(block.saved["x"], row)
        assert block.saved["x"].untyped_storage().nbytes() == 3 * 16  # the three together


def test_what_is_left_when_requests_end_is_moved_together(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_LOOKED_AT", 2)
    blocks = [batch.add(f"r{i}", KEEP) for i in range(8)]
    rows = {f"r{i}": (i, i + 1) for i in range(8)}
    expected = []
    for step in range(6):
        whole = _value(8) + 100 * step
        expected.append(whole.clone())
        batch.step({"a": whole}, rows, 8)
    derived = blocks[0].saved["kept"][5][0]  # the block goes on to hold a view of what it kept
    ended = [f"r{i}" for i in range(2, 8)]
    del blocks[2:]
    batch.interleaver.drop(ended)
    for name in ended:
        del rows[name]
    for _ in range(4):  # it goes by a few at a time
        batch.step({"b": _value(2)}, rows, 2)
    for index, block in enumerate(blocks):
        for step, kept in enumerate(block.saved["kept"]):
            assert torch.equal(kept, expected[step][index : index + 1])
            assert kept.untyped_storage().nbytes() == (8 if step == 5 else 2) * 16
    assert torch.equal(derived, expected[5][0])
    blocks[0].saved["kept"][5].zero_()
    assert derived.eq(0).all()


def test_slabs_that_nobody_holds_are_forgotten(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_FEW", 4)
    text = "for _ in tracer.iter[:]:\n    x = model.a.output\n    y = model.b.output + x"
    rows = {f"r{i}": (i, i + 1) for i in range(2)}
    for name in rows:
        batch.add(name, text)
    batch.interleaver.slabs._most = 4
    for _ in range(40):
        batch.step({"a": _value(2), "b": _value(2)}, rows, 2)
    assert len(batch.interleaver.slabs._slabs) <= 8


def test_a_block_that_goes_on_after_an_error_about_a_view_has_what_it_kept(batch: Batch) -> None:
    text = """
    x = model.a.output.save()
    array = x[:1].numpy()
    try:
        model.b.output
    except Exception:
        del array
        total = float(x.sum())
        x += 1
        total = total.save() if False else total
    z = torch.tensor(total).save()
    model.c.output
    """
    blocks = [batch.add("r0", KEEP), batch.add("r1", text), batch.add("r2", KEEP)]
    whole = _value(3)
    copy = whole.clone()
    batch.step({"a": whole, "b": _value(3), "c": _value(3)}, {f"r{i}": (i, i + 1) for i in range(3)}, 3)
    assert blocks[1].failure is None
    assert torch.equal(blocks[1].saved["x"], copy[1:2] + 1)
    assert float(blocks[1].saved["z"]) == float(copy[1].sum())
    assert torch.equal(blocks[2].saved["kept"][0], copy[2:3])
    assert torch.equal(blocks[0].saved["kept"][0], copy[0:1])


# Gathering for the way up.


def _pieces(memory: mmap.mmap) -> list[Piece]:
    half = [torch.randn(2, 3).half() for _ in range(3)]
    rows = [torch.randn(1, 32) for _ in range(4)]
    more = [torch.randn(3, 32) for _ in range(2)]
    return [
        Piece(rows, torch.float32, memory, 0, 128),
        Piece(more, torch.float32, memory, 512, 384),
        Piece(half, torch.float16, memory, 1344, 64),
        Piece(half, torch.float32, memory, 1536, 64),
        Piece([torch.tensor(7)], torch.int64, memory, 1728, 64),
        Piece([torch.randn(32, 2).T], torch.float32, memory, 1792, 256),
        Piece([torch.randn(5, 32)], torch.float32, memory, 20480, 640),
    ]


@pytest.mark.parametrize("chosen", [slice(0, 7), slice(0, 2), slice(0, 1), slice(2, 3), slice(3, 4), slice(4, 5)])
def test_gathered_bytes_are_those_that_the_host_copies(chosen: slice) -> None:
    memory, other = mmap.mmap(-1, 1 << 16), mmap.mmap(-1, 1 << 16)
    pieces = _pieces(memory)[chosen]
    HostStaging().copy(pieces, lambda: None)
    for piece in pieces:
        for index, tensor in enumerate(piece.tensors):
            there = torch.frombuffer(
                memory, dtype=piece.dtype, count=tensor.numel(), offset=piece.offset + index * piece.step
            )
            assert torch.equal(there.view(tensor.shape), tensor.to(piece.dtype))
    runs = list(_runs(pieces))
    gathered, start = gather(runs), 0
    for run in runs:
        size = run[-1].offset + run[-1].nbytes - run[0].offset
        other[run[0].offset : run[0].offset + size] = gathered[start : start + size].numpy().tobytes()
        start += size
    assert start == len(gathered)
    assert memory[:] == other[:]
