"""The programs that a worker has been sent."""

from __future__ import annotations

import ast
from collections import OrderedDict
from typing import Any, Final

import msgspec

from nnsight_async.protocol import KNOWN_PROGRAMS
from nnsight_async.tracing import CompiledProgram, Program, compile_program
from nnsight_async.worker.mutation import Mutation, find_mutation
from nnsight_async.worker.taps import Places

#: Stands in for a program that could not be compiled.
NO_PROGRAM: Final = (
    CompiledProgram(
        compile("", "<block>", "exec"), Program("", "<block>", 1, "", (), (), (), "", None, 0), frozenset()
    ),
    Mutation(False),
)


class Programs:
    """The programs that requests name by their digests, compiled when they are first needed."""

    def __init__(self) -> None:
        self._encoded: OrderedDict[str, bytes] = OrderedDict()
        self._compiled: OrderedDict[str, tuple[CompiledProgram, Mutation]] = OrderedDict()
        self._places: OrderedDict[str, Places] = OrderedDict()

    def add(self, digest: str, encoded: bytes) -> None:
        """Take in a program as it travels."""
        self._encoded[digest] = encoded
        keep_newest(self._encoded, 8 * KNOWN_PROGRAMS)

    def get(self, digest: str) -> tuple[CompiledProgram, Mutation]:
        """A program, and what it may change in place.

        Raises:
            LookupError: it was not sent, or so long ago that it is forgotten.
        """
        if digest not in self._encoded:
            raise LookupError("the block's program is missing; run the trace again")
        self._encoded.move_to_end(digest)
        known = self._compiled.get(digest)
        if known is None:
            program = msgspec.msgpack.decode(self._encoded[digest], type=Program)
            known = self._compiled[digest] = (compile_program(program), find_mutation(ast.parse(program.wrapped)))
            keep_newest(self._compiled, KNOWN_PROGRAMS)
        return known

    def places(self, digest: str) -> Places:
        """What a program is known to look at."""
        places = self._places.setdefault(digest, Places())
        self._places.move_to_end(digest)
        keep_newest(self._places, KNOWN_PROGRAMS)
        return places


def keep_newest(table: OrderedDict[str, Any], most: int) -> None:
    """Drop the oldest entries of a table that has more than ``most``."""
    while len(table) > most:
        table.popitem(last=False)
