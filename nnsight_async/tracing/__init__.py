"""From a with-block to a program that runs in another process, and back into the caller's variables.

The way of a block: `find_block` takes its text from the frame, `BodySkip` keeps it from running there,
`make_program` checks and describes it, `collect` and `dumps` pack the values it reads, `find_edits` tells
whether it may write; in the worker `compile_program` and `loads` make code and values of that; and
`write_back` binds what was saved in the caller's frame.
"""

from nnsight_async.tracing.binding import collect, dumps, loads
from nnsight_async.tracing.edits import Edits, find_edits
from nnsight_async.tracing.live import live_names
from nnsight_async.tracing.program import CompiledProgram, Program, compile_program, make_program, source_line
from nnsight_async.tracing.skip import BodySkip
from nnsight_async.tracing.source import BlockSource, find_block
from nnsight_async.tracing.writeback import write_back

__all__ = [
    "BlockSource",
    "BodySkip",
    "CompiledProgram",
    "Edits",
    "Program",
    "collect",
    "compile_program",
    "dumps",
    "find_block",
    "find_edits",
    "live_names",
    "loads",
    "make_program",
    "source_line",
    "write_back",
]
