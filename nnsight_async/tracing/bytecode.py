"""Small readers of CPython bytecode that several steps of tracing share."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

__all__ = ["HandlerRange", "handler_at", "handler_ranges", "nested_codes", "same_block", "same_code"]

_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


@dataclass(frozen=True, slots=True)
class HandlerRange:
    """The instructions from `start` up to `end` (byte offsets) jump to `target` when they raise."""

    start: int
    end: int
    target: int


def handler_ranges(code: CodeType) -> list[HandlerRange]:
    """The exception table of `code`, inner ranges as CPython splits them: no two of them overlap."""
    data = iter(code.co_exceptiontable)
    ranges: list[HandlerRange] = []
    for first in data:
        start = _varint(data, first) * 2
        length = _varint(data) * 2
        target = _varint(data) * 2
        _varint(data)  # stack depth and lasti flag: of no interest here
        ranges.append(HandlerRange(start, start + length, target))
    return ranges


def _varint(data: Iterator[int], first: int | None = None) -> int:
    """One number of the exception table: six bits a byte, the 0x40 bit says that more follow."""
    byte = next(data) if first is None else first
    value = byte & 0x3F
    while byte & 0x40:
        byte = next(data)
        value = (value << 6) | (byte & 0x3F)
    return value


def handler_at(ranges: list[HandlerRange], offset: int) -> int | None:
    """Where an exception raised at `offset` is handled, or None when it leaves the frame."""
    for entry in ranges:
        if entry.start <= offset < entry.end:
            return entry.target
    return None


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """`code` and every code object inside it, outermost first."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested_codes(const)


def same_code(left: CodeType, right: CodeType) -> bool:
    """Whether two code objects come from the same source text at the same place."""
    return (
        left.co_code == right.co_code
        and left.co_name == right.co_name
        and left.co_names == right.co_names
        and left.co_varnames == right.co_varnames
        and left.co_freevars == right.co_freevars
        and left.co_cellvars == right.co_cellvars
        and list(left.co_positions()) == list(right.co_positions())
        and len(left.co_consts) == len(right.co_consts)
        and all(_same_constant(a, b) for a, b in zip(left.co_consts, right.co_consts, strict=True))
    )


def _same_constant(left: object, right: object) -> bool:
    if isinstance(left, CodeType) and isinstance(right, CodeType):
        return same_code(left, right)
    return type(left) is type(right) and (left == right or repr(left) == repr(right))


def same_block(left: CodeType, right: CodeType, first_line: int, last_line: int) -> bool:
    """Whether the instructions of the lines `first_line` to `last_line` do the same in both.

    Looser than `same_code`: what surrounds the lines may have been rewritten (as pytest does with `assert`).
    """
    return _steps(left, first_line, last_line) == _steps(right, first_line, last_line)


def _steps(code: CodeType, first_line: int, last_line: int) -> list[tuple[str, object]]:
    steps: list[tuple[str, object]] = []
    for instruction in dis.get_instructions(code):
        where = instruction.positions
        if where is None or where.lineno is None or where.end_lineno is None:
            continue
        if not (first_line <= where.lineno and where.end_lineno <= last_line):
            continue
        value: object = instruction.argrepr
        if isinstance(instruction.argval, CodeType):
            value = [
                (inner.co_code, inner.co_names, [c for c in inner.co_consts if not isinstance(c, CodeType)])
                for inner in nested_codes(instruction.argval)
            ]
            value = repr(value)
        elif instruction.opcode in _JUMPS:
            value = None  # distances move with the code around the block
        steps.append((instruction.opname, value))
    return steps
