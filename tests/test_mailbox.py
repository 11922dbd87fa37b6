"""The parts of the way up by themselves, without an engine: values in bytes, shared pages, unread bytes."""

from __future__ import annotations

import ast
import asyncio
import gc
import math
import os
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_async import wire
from nnsight_async.changes import Grow, Set, Shadow, added, apply
from nnsight_async.client.ledger import Ledger
from nnsight_async.client.map import Map
from nnsight_async.client.segments import Segments
from nnsight_async.errors import MailboxFullError
from nnsight_async.protocol import BlockState, Entry, SegmentOpened
from nnsight_async.segments import PAGE
from nnsight_async.worker.arena import Arena, Segment
from nnsight_async.worker.mutation import find_lists_that_only_grow
from nnsight_async.worker.parameters import ReadOnly

# Values.


class _Bytes:
    """Tensors' bytes in one buffer."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.count = 0

    def add(self, tensor: torch.Tensor) -> tuple[int, torch.dtype]:
        self.count += 1
        offset = len(self.data)
        if tensor.numel():
            self.data += tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.data += bytes(-len(self.data) % wire.ALIGN)
        return offset, tensor.dtype

    def add_alike(self, tensors: Sequence[torch.Tensor]) -> tuple[int, torch.dtype]:
        places = [self.add(tensor) for tensor in tensors]
        return places[0]


def _there_and_back(value: Any) -> Any:
    data = _Bytes()
    message = wire.dumps({"x": Set(value)}, data, lambda obj: ("it",) if obj is _there_and_back else None)
    loaded = wire.Loader().load(message, data.data, lambda reference: _there_and_back)
    return apply({}, loaded)["x"]


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.Size([2, 3]), np.float32(1.5), {1, 2}, range(3), _there_and_back]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=12,
)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same(list(one.items()), list(other.items()))
    return bool(one == other)


@settings(max_examples=300, deadline=None)
@given(_values)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert _same(_there_and_back(value), value)


def _made(dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor of a type; None of the few that PyTorch knows and cannot fill (bits, and integers below a byte)."""
    try:
        return torch.arange(24).to(dtype).reshape(2, 3, 4)
    except (RuntimeError, NotImplementedError):
        return None


_TYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype) and _made(v) is not None}, key=str)


@pytest.mark.parametrize("dtype", _TYPES)
def test_tensors_of_every_type(dtype: torch.dtype) -> None:
    tensor = _made(dtype)
    assert tensor is not None
    back, (again, part) = _there_and_back([tensor, (tensor, tensor[:, 1])])
    assert (back.dtype, back.shape) == (dtype, (2, 3, 4))
    assert again is back
    raw = tensor.view(torch.uint8) if dtype is not torch.bool else tensor
    assert torch.equal(back.view(torch.uint8) if dtype is not torch.bool else back, raw)
    assert part.shape == (2, 4)
    assert _there_and_back(tensor[:, :0]).shape == (2, 0, 4)
    assert _there_and_back(tensor[0, 0, 0]).shape == ()


def test_special_tensors_pickle_themselves_with_their_parts_beside() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(_there_and_back(sparse).to_dense(), torch.eye(3))
    frozen = [torch.full((4,), float(number)).as_subclass(ReadOnly) for number in range(50)]
    back = _there_and_back(frozen)  # each makes a tensor of its own only while it is packed
    assert [int(tensor[0]) for tensor in back] == list(range(50))
    parameter = torch.nn.Parameter(torch.arange(3.0))
    assert type(_there_and_back(parameter)) is torch.Tensor
    assert math.isnan(_there_and_back(float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(1, 3), (16,), (), (2, 0), (2, 3, 4)])
def test_lists_of_tensors_that_are_alike(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [torch.randint(0, 9, shape).to(dtype) for _ in range(5)]
    back, again, mixed = _there_and_back([tensors, (tensors[3], tensors[1]), [*tensors, torch.zeros(7)]])
    for one in (back, mixed[:5]):
        assert type(one) is list
        assert [(tensor.dtype, tensor.shape) for tensor in one] == [(dtype, torch.Size(shape))] * 5
        assert all(map(torch.equal, one, tensors))
    if tensors[0].numel():
        assert again[0] is back[3] is mixed[3]
        assert again[1] is back[1]
        assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 5
        assert back[2].untyped_storage().nbytes() == tensors[2].numel() * dtype.itemsize
    twice = _there_and_back([tensors[0], tensors[0], tensors[1]])
    assert twice[0] is twice[1]
    assert all(map(torch.equal, twice, [tensors[0], tensors[0], tensors[1]]))


def _travelled(changes: dict[str, Any]) -> dict[str, Any]:
    data = _Bytes()
    message = wire.dumps(changes, data, lambda value: None)
    return wire.Loader().load(message, data.data, lambda reference: None)


def test_changes_say_what_was_added() -> None:
    shadow = Shadow()
    values: dict[str, Any] = {}
    saved: dict[str, Any] = {"list": [1], "dict": {"a": [1]}, "one": 1, "nested": [[1]]}
    changes = _travelled(shadow.update(saved))
    values = apply(values, changes)
    assert added(values, changes) == saved
    saved["list"].append(2)
    saved["dict"]["b"] = 2
    saved["dict"]["a"].append(3)
    saved["nested"][0].append(2)
    changes = _travelled(shadow.update(saved))
    values = apply(values, changes)
    assert values == saved
    assert added(values, changes) == {"list": [2], "dict": {"a": [1, 3], "b": 2}, "nested": [[1, 2]]}
    assert added(values, shadow.update(saved)) == {}


def test_lists_that_only_grow_are_told_from_the_source() -> None:
    def found(text: str) -> set[str]:
        return set(find_lists_that_only_grow(ast.parse(text)))

    assert found("a = list().save()\nfor s in t:\n    a.append(m.x.output)") == {"a"}
    assert found("a, b = [].save(), list()\na.append(1)\nb.extend(a)") == {"b"}
    for text in (
        "a = b = []\na.append(1)",
        "a = []\na.append(a)",
        "a = []\na[0] = 1",
        "a = []\na += [1]",
        "a = []\nf(a)",
        "a = []\nx = a.append",
        "a = []\na.append(1)\nlocals()",
        "list = dict\na = list()\na.append(1)",
        "a = x.save()\na.append(1)",
        "a = []\nfor a in b:\n    a.append(1)",
        "a = []\nwith b as a:\n    a.append(1)",
        "a = []\nimport b as a\na.append(1)",
        "a = []\ndef f(a):\n    a.append(1)",
    ):
        assert not found(text), text


def test_a_list_that_only_grows_is_another_one_after_it_was_made_anew() -> None:
    shadow = Shadow()
    first, second = [1, 2], [3, 4, 5]
    assert apply({}, shadow.update({"a": first}, only_grow={"a"})) == {"a": [1, 2]}
    first.append(3)
    assert shadow.update({"a": first}, only_grow={"a"}) == {"a": Grow({}, [3])}
    values = apply({"a": [1, 2, 3]}, shadow.update({"a": second}, only_grow={"a"}))
    assert values == {"a": [3, 4, 5]}


# Shared pages.


def test_pages_are_used_again_when_they_are_given_back() -> None:
    segment = Segment(0, 64)
    generator, held = random.Random(0), {}
    for _ in range(2000):
        if held and generator.random() < 0.5:
            segment.release(generator.choice(list(held)))
            for start in [s for s in held if segment.memory[s] == 2]:
                del held[start]
            segment.reclaim()
        else:
            pages = generator.randint(1, 12)
            start = segment.allocate(pages)
            if start is not None:
                taken = {page for first, count in held.items() for page in range(first, first + count)}
                assert not taken & set(range(start, start + pages))
                assert start + pages <= 64
                held[start] = pages
            else:
                free = [stop - begin for begin, stop in segment._free]
                assert max(free, default=0) < pages
        assert segment.used == sum(held.values())
    for start in list(held):
        segment.release(start)
    segment.reclaim()
    assert segment._free == [(0, 64)]
    segment.close(remove=True)


def test_a_range_is_given_back_with_the_last_thing_that_shows_it() -> None:
    arena, idle = Arena(), []
    segments = Segments(lambda: idle.append(1))
    segment, page = arena.allocate(3 * PAGE)
    (opened,) = arena.opened()
    segments.open(SegmentOpened(opened.number, f"/proc/{os.getpid()}/fd/{opened.fd}", opened.pages))
    begin = segment.base + page * PAGE
    segment.memory[begin : begin + 3 * PAGE] = bytes(range(256)) * (3 * PAGE // 256)
    entry = Entry("r", 0, BlockState.DONE, segment=segment.number, offset=page, nbytes=3 * PAGE)
    taken = segments.take(entry)
    tensors = [torch.frombuffer(taken, dtype=torch.uint8, count=256, offset=start) for start in (0, PAGE)]
    del taken
    assert segments.in_use == 3 * PAGE
    view = tensors[1][3:9]
    del tensors
    arena.reclaim()
    assert arena.used == 3 * PAGE
    assert view.tolist() == [3, 4, 5, 6, 7, 8]
    del view
    gc.collect(0)
    assert segments.in_use == 0
    arena.reclaim()
    assert arena.used == 0
    assert not idle  # little is mapped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 5])
def test_a_range_is_given_back_with_the_last_of_a_list_of_tensors(dtype: torch.dtype, width: int) -> None:
    arena = Arena()
    segments = Segments(lambda: None)
    segment, page = arena.allocate(PAGE)
    (opened,) = arena.opened()
    segments.open(SegmentOpened(opened.number, f"/proc/{os.getpid()}/fd/{opened.fd}", opened.pages))
    data = _Bytes()
    message = wire.dumps({"x": Set([*torch.ones(3, 1, width, dtype=dtype)])}, data, lambda value: None)
    begin = segment.base + page * PAGE
    segment.memory[begin : begin + len(data.data)] = data.data
    entry = Entry("r", 0, BlockState.DONE, segment=segment.number, offset=page, nbytes=len(data.data))
    tensors = apply({}, wire.Loader().load(message, segments.take(entry), lambda reference: None))["x"]
    assert all(map(torch.equal, tensors, torch.ones(3, 1, width, dtype=dtype)))
    view = tensors[1][0, 1:]
    del tensors
    assert segments.in_use == len(data.data)
    assert view.eq(1).all()
    del view
    assert segments.in_use == 0


def test_memory_beyond_the_spare_is_closed() -> None:
    arena = Arena()
    places = [arena.allocate(200 << 20) for _ in range(3)]
    arena.opened()
    assert arena.trim() == []
    for segment, page in places:
        segment.release(page)
    descriptors = [segment.fd for segment, _ in places]
    closed = arena.trim()
    assert len(closed) == 2
    assert sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in descriptors) == 1
    arena.close()
    assert not arena.segments


# Unread bytes.


def test_a_request_has_its_share_and_no_more_when_all_is_full() -> None:
    ledger = Ledger(100)
    first, second = ledger.open(), ledger.open()
    first.arrive(90)  # more than half, while there is room
    second.arrive(10)
    with pytest.raises(MailboxFullError, match=r"90 bytes.*mailbox_bytes=100 \(2 requests"):
        first.arrive(1)
    second.arrive(30)  # less than its share: it is the other who has too much
    first.read(90)
    second.arrive(40)
    assert ledger.unread == 80
    first.arrive(1000)  # it finds nothing unread
    assert ledger.unread == 1080
    with pytest.raises(MailboxFullError):
        second.arrive(1)
    first.finish()
    first.read(1000)
    assert len(ledger.accounts) == 1
    second.arrive(1)
    del second
    assert ledger.unread == 0
    assert not ledger.accounts


# Mapping.


async def test_a_map_keeps_the_order_and_ends_what_it_started() -> None:
    started, ended = [], []

    async def work(number: int) -> int:
        started.append(number)
        try:
            await asyncio.sleep(0.001 * (5 - number % 5))
            if number == 13:
                raise ValueError("thirteen")
        finally:
            ended.append(number)
        return number

    assert [n async for n in Map(work, range(12), 4)] == list(range(12))
    assert [n async for n in Map(work, [], 4)] == []
    seen = []
    started.clear()
    ended.clear()
    with pytest.raises(ValueError, match="thirteen"):
        async for number in Map(work, range(10, 100), 4):
            seen.append(number)
    assert seen == [10, 11, 12]
    assert sorted(started) == sorted(ended)
    assert max(started) <= 17
    async with Map(work, iter(range(20, 90)), 3) as results:
        assert await anext(results) == 20
    assert sorted(started) == sorted(ended)
    with pytest.raises(StopAsyncIteration):
        await anext(results)
