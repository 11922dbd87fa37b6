"""A block as a program: checked and described in the caller's process, compiled in the worker's."""

from __future__ import annotations

import ast
import hashlib
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType

from nnsight_async.errors import CaptureError
from nnsight_async.tracing.checks import check_block
from nnsight_async.tracing.free_names import NestedScopes
from nnsight_async.tracing.gathers import gather_loops
from nnsight_async.tracing.holds import hold_views
from nnsight_async.tracing.liveness import Liveness
from nnsight_async.tracing.mangle import mangle, mangle_tree
from nnsight_async.tracing.saves import Saves, rewrite_saves
from nnsight_async.tracing.scopes import BlockNames, block_names
from nnsight_async.tracing.source import BlockSource

__all__ = ["CompiledProgram", "Program", "compile_program", "make_program", "source_line"]


@dataclass(frozen=True, slots=True)
class Program:
    """What is sent of a block: its text and everything needed to compile it where its file does not exist.

    Attributes:
        text: the source text, as written.
        filename: the file it stands in, for tracebacks.
        first_line: the line that `text` begins on.
        digest: identifies the program, and the Python version that made it, among all others.
        reads: the names whose values the block needs from the caller.
        binds: the names it binds.
        saves: the names it is certain to save if it runs to its end.
        wrapped: `text` in a form that can be parsed, its first line on line 2.
        class_name: the class whose private names it uses, or None.
        flags: the `from __future__` switches it is compiled under.
    """

    text: str
    filename: str
    first_line: int
    digest: str
    reads: tuple[str, ...]
    binds: tuple[str, ...]
    saves: tuple[str, ...]
    wrapped: str
    class_name: str | None
    flags: int


class CompiledProgram:
    """A program's code, to be run as `exec(compiled.code, namespace)`: each of its variables is a key of
    `namespace`.

    The namespace has to hold the values of `program.reads`, and the functions that saves were turned into:
    `__save__(value, names)`, `__save_result__(tracer, names)`, `__save_call__(function, value, names)` and
    `__save_whole__(function, value, names)`. The last two stand for `function(value)` where `function` may or
    may not be this package's `save`; the very last must do nothing if it is not. Besides them `__hold__(value)`,
    see `holds`, and `__gather__`, `__gathered__` and `__rest__`, see `gathers`.

    Attributes:
        code: module-level code with the user's own file name and line numbers.
        program: what it was compiled from.
        dead: what `dead_names` has found, by offset.
    """

    def __init__(self, code: CodeType, program: Program, kept: frozenset[str]) -> None:
        self.code = code
        self.program = program
        self._kept = kept
        self.dead: dict[int, tuple[str, ...]] = {}

    @cached_property
    def _liveness(self) -> Liveness:
        return Liveness(self.code, self._kept)

    def live_names(self, offset: int) -> frozenset[str]:
        """The variables that may still be read after the instruction at `offset`, before they are bound
        again.

        Variables that are saved, and those that functions of the block read, always count.

        Args:
            offset: `f_lasti` of the frame that runs `code`.
        """
        return self._liveness.after(offset)

    def dead_names(self, offset: int | None, saved: Collection[str]) -> tuple[str, ...]:
        """The variables that the block binds and that will not be read before they are bound again.

        Args:
            offset: as for `live_names`; None where the code has come to its end, after which only what is saved
                counts.
            saved: the names that have been saved.
        """
        if offset is None:
            return tuple(name for name in self.program.binds if name not in saved)
        dead = self.dead.get(offset)
        if dead is None:
            live = self.live_names(offset)
            dead = self.dead[offset] = tuple(name for name in self.program.binds if name not in live)
        return dead


@lru_cache(maxsize=1024)
def make_program(source: BlockSource) -> Program:
    """Check a block and describe it as a program.

    Raises:
        CaptureError: the block holds something that cannot run in another process (`return`, `await`, ...),
            or saves a value that no variable takes. Names the line and the remedy.
    """
    parsed = _parse(source.wrapped(), source.filename, source.first_line, source.class_name)
    described = {
        "text": source.text,
        "filename": source.filename,
        "first_line": source.first_line,
        "reads": parsed.sorted(parsed.names.reads),
        "binds": parsed.sorted(parsed.names.binds),
        "saves": parsed.sorted(parsed.saves.certain),
        "wrapped": source.wrapped(),
        "class_name": source.class_name,
        "flags": source.flags,
    }
    digest = hashlib.sha256(repr((sys.version_info[:3], sorted(described.items()))).encode()).hexdigest()
    program = Program(digest=digest, **described)  # type: ignore[arg-type]
    _compile(parsed.body, program)  # whatever the compiler refuses is refused here, not in the worker
    return program


def compile_program(program: Program) -> CompiledProgram:
    """Compile a program, in a process that has neither its frame nor its file."""
    parsed = _parse(program.wrapped, program.filename, program.first_line, program.class_name)
    kept = parsed.sorted(parsed.saves.certain | parsed.saves.possible)
    return CompiledProgram(_compile(gather_loops(hold_views(parsed.body)), program), program, frozenset(kept))


def source_line(program: Program, lineno: int) -> str:
    """The text of line `lineno` of the program's file, without its end; empty for a line outside the block."""
    lines = program.text.splitlines()
    index = lineno - program.first_line
    return lines[index] if 0 <= index < len(lines) else ""


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A block's rewritten statements and what is known of its names (as written, not mangled)."""

    body: list[ast.stmt]
    names: BlockNames
    saves: Saves
    class_name: str | None

    def sorted(self, names: set[str] | frozenset[str]) -> tuple[str, ...]:
        """The names as Python stores them, in a fixed order."""
        return tuple(sorted({mangle(name, self.class_name) for name in names}))


def _parse(wrapped: str, filename: str, first_line: int, class_name: str | None) -> _Parsed:
    shift = first_line - 2

    def where(node: ast.AST) -> str:
        return f"{filename}:{getattr(node, 'lineno', 2) + shift}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the caller's own compilation has warned already
        tree = ast.parse(wrapped, filename)
        wrapper = tree.body[0]
        assert isinstance(wrapper, ast.If)
        body = wrapper.body
        check_block(body, where)
    scopes = NestedScopes()
    names = block_names(body, scopes)
    saves = rewrite_saves(body, names.binds, scopes, where, class_name)
    body = [_Plain().visit(statement) for statement in body]
    for statement in body:
        mangle_tree(statement, class_name)
        ast.increment_lineno(statement, shift)
    return _Parsed(body, names, saves, class_name)


class _Plain(ast.NodeTransformer):
    """Drops the annotations of the block's own variables: in a function Python does not evaluate them either."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node  # what stands in a function is not the block's own

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        return node


def _compile(body: list[ast.stmt], program: Program) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = compile(ast.Module(body, []), program.filename, "exec", program.flags, dont_inherit=True, optimize=0)
        except SyntaxError as error:
            remedy = ""
            if "nonlocal" in error.msg:
                remedy = "; to its functions a block's variables are globals: change an object (a list, a dict) instead"
            raise CaptureError(f"{program.filename}:{error.lineno}: {error.msg}{remedy}.") from None
    assert isinstance(code, CodeType)
    return code
