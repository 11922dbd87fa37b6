"""Which variables of a program can still be read from a point of its bytecode on."""

from __future__ import annotations

import dis
from bisect import bisect_right
from types import CodeType

from nnsight_async.tracing.bytecode import handler_at, handler_ranges, nested_codes

__all__ = ["Liveness"]

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_WRITES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_ALWAYS_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_SEES_ALL = frozenset({"locals", "globals", "vars", "dir", "eval", "exec"})


class Liveness:
    """Backward liveness of the variables of module-level code, worked out once for all of its instructions."""

    def __init__(self, code: CodeType, always: frozenset[str]) -> None:
        instructions = list(dis.get_instructions(code))
        self._offsets = [instruction.offset for instruction in instructions]
        nested = {
            str(instruction.argval)
            for inner in list(nested_codes(code))[1:]
            for instruction in dis.get_instructions(inner)
            if instruction.opname in _READS
        }
        names = {str(i.argval) for i in instructions if i.opname in _READS or i.opname in _WRITES} | nested
        # A function may run at any time, and `locals()` and its kin look at everything.
        self._always = always | (names if names & _SEES_ALL else nested)
        index = {offset: position for position, offset in enumerate(self._offsets)}
        ranges = handler_ranges(code)
        self._after: list[list[int]] = []
        for position, instruction in enumerate(instructions):
            following: list[int] = []
            leaves = instruction.opname in _ENDS or instruction.opname in _ALWAYS_JUMPS
            if not leaves and position + 1 < len(instructions):
                following.append(position + 1)
            if instruction.opcode in _JUMPS:
                following.append(index[instruction.argval])
            handler = handler_at(ranges, instruction.offset)
            if handler is not None:
                following.append(index[handler])
            self._after.append(following)
        self._reads: list[str | None] = [str(i.argval) if i.opname in _READS else None for i in instructions]
        self._writes: list[str | None] = [str(i.argval) if i.opname in _WRITES else None for i in instructions]
        handlers = [handler_at(ranges, i.offset) for i in instructions]
        self._handler_index = [None if target is None else index[target] for target in handlers]
        self._in = self._solve()
        self._answers: dict[int, frozenset[str]] = {}

    def _solve(self) -> list[frozenset[str]]:
        before: list[frozenset[str]] = [frozenset()] * len(self._offsets)
        changed = True
        while changed:  # backwards, so that straight-line code settles in one pass and each loop adds one
            changed = False
            for position in range(len(before) - 1, -1, -1):
                live = set().union(*(before[following] for following in self._after[position]))
                written = self._writes[position]
                if written is not None:
                    live.discard(written)
                    handler = self._handler_index[position]
                    if handler is not None:
                        live |= before[handler]
                read = self._reads[position]
                if read is not None:
                    live.add(read)
                if len(live) != len(before[position]):  # sets only grow
                    before[position] = frozenset(live)
                    changed = True
        return before

    def after(self, offset: int) -> frozenset[str]:
        """The variables that may be read once the instruction at byte `offset` is done, before they are bound
        again.

        The offset may lie within the instruction's inline cache, where a suspended frame's `f_lasti` can
        point.
        """
        position = bisect_right(self._offsets, offset) - 1
        if position < 0:
            return self._always | (self._in[0] if self._in else frozenset())
        answer = self._answers.get(position)
        if answer is None:
            answer = self._always.union(*(self._in[following] for following in self._after[position]))
            self._answers[position] = answer
        return answer
