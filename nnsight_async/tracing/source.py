"""Finding the source text of the block that a frame is about to run.

A context manager's `__enter__` sees only the frame of the with statement. The instruction that frame is at
says where the statement stands, to the column; its file, the interpreter's own list of lines, or what was
typed has the text.
"""

from __future__ import annotations
import __future__

import ast
import dis
import linecache
import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

from nnsight_async.errors import SourceError
from nnsight_async.tracing.bytecode import nested_codes, same_block
from nnsight_async.tracing.interactive import CHECKED_FILENAMES, typed_lines
from nnsight_async.tracing.mangle import mangle

__all__ = ["BlockSource", "find_block"]

_Position = tuple[int | None, int | None, int | None, int | None]  # first line, last line, first column, last column

_STARTED = time.time()
_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag

_ENTERS = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH"})
_AWAITS = frozenset({"SEND", "GET_AWAITABLE", "YIELD_VALUE", "RESUME", "JUMP_BACKWARD_NO_INTERRUPT"})

_BLOCKS_KEPT = 1024
_FILES_KEPT = 64


@dataclass(frozen=True, slots=True)
class BlockSource:
    """The body of one with statement, as written, and where it stands.

    Attributes:
        text: the body's source text, not dedented; whole lines, unless it stands on the with statement's own
            line.
        filename: the file it is in, as the running code names it.
        first_line: the line that `text` begins on, counted from 1.
        last_line: the line of its last character.
        first_column: where the first statement begins, in UTF-8 bytes.
        last_column: where the last statement ends, in UTF-8 bytes.
        inline: whether the body stands on the with statement's line (`with x: a; b`); `text` then begins at
            `first_column` rather than at the start of the line.
        with_line: the line the with statement begins on.
        is_last_item: whether no further context manager follows in the same statement.
        has_target: whether the statement binds something with `as`.
        target: the variable it binds, if that is a plain name.
        class_name: the class whose private names (`self.__x`) the body uses, or None.
        flags: the `from __future__` switches the body was compiled under.
    """

    text: str
    filename: str
    first_line: int
    last_line: int
    first_column: int
    last_column: int
    inline: bool
    with_line: int
    is_last_item: bool
    has_target: bool
    target: str | None
    class_name: str | None
    flags: int

    @property
    def where(self) -> str:
        """`file:line` of the with statement, for messages."""
        return f"{self.filename}:{self.with_line}"

    def wrapped(self) -> str:
        """The text under an `if 1:` line, which can be parsed; its second line is line `first_line` of the
        file.
        """
        if self.inline:
            return "if 1:\\\n" + " " * self.first_column + self.text + "\n"
        return "if 1:\n" + self.text + "\n"


@dataclass(frozen=True, slots=True)
class _Item:
    """One `expression as target` of a with statement."""

    statement: ast.With | ast.AsyncWith
    index: int
    class_name: str | None

    @property
    def expression(self) -> ast.expr:
        return self.statement.items[self.index].context_expr


class _Text:
    """One parsed source text and the with statements in it."""

    def __init__(self, lines: Sequence[str], filename: str) -> None:
        self.lines = lines
        self.filename = filename
        self.by_position: dict[_Position, list[_Item]] = {}
        self.items: list[_Item] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("".join(lines), filename)
        pending: list[tuple[ast.AST, str | None]] = [(tree, None)]
        while pending:
            node, class_name = pending.pop()
            if isinstance(node, ast.ClassDef):
                class_name = node.name
            if isinstance(node, ast.With | ast.AsyncWith):
                for index in range(len(node.items)):
                    item = _Item(node, index, class_name)
                    self.items.append(item)
                    # Up to Python 3.12 the entering instruction has the statement's position, from 3.13 the
                    # item's.
                    for place in (node, item.expression):
                        self.by_position.setdefault(_position(place), []).append(item)
            pending.extend((child, class_name) for child in ast.iter_child_nodes(node))

    def at(self, position: _Position, rank: int) -> _Item | None:
        """The item at `position`; of several in one statement the one numbered `rank` in order of entering."""
        found = self.by_position.get(position)
        return found[rank % len(found)] if found else None

    def on_line(self, line: int | None) -> list[_Item]:
        """The items on a line, for code that keeps no columns."""
        return [item for item in self.items if line in (item.statement.lineno, item.expression.lineno)]


_blocks: OrderedDict[tuple[int, int], tuple[CodeType, BlockSource]] = OrderedDict()
_texts: OrderedDict[str, _Text] = OrderedDict()


def find_block(frame: FrameType) -> BlockSource:
    """The body of the with statement that `frame` is entering.

    To be called while the statement's `__enter__` or `__aenter__` runs, with the frame the statement stands
    in. Asking again for the same statement costs a dictionary look-up.

    Raises:
        SourceError: the text cannot be found, or the file no longer has the statement there.
    """
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    kept = _blocks.get(key)
    if kept is not None:
        return kept[1]
    block = _find(frame)
    _blocks[key] = (code, block)  # holding the code keeps its id from being given to another
    if len(_blocks) > _BLOCKS_KEPT:
        _blocks.popitem(last=False)
    return block


def _find(frame: FrameType) -> BlockSource:
    code = frame.f_code
    position, rank = _entering(frame)
    line = position[0] or frame.f_lineno
    text = _text(frame, line)
    item = text.at(position, rank)
    if item is None and (position[2] is None or code.co_filename.startswith("<")):
        # Columns can be missing (`-X no_debug_ranges`) or moved by a tool that rewrites cells.
        found = text.on_line(line)
        item = found[rank % len(found)] if found and len({id(one.statement) for one in found}) == 1 else None
    if item is None:
        raise SourceError(
            f"there is no with statement at {code.co_filename}:{line} where the running code has one: the file was "
            "edited since it was imported. Import it again (importlib.reload) or restart the program."
        )
    block = _cut(text, item, code)
    if _edited_since_start(code.co_filename):
        _check_unedited(text, block, code)
    return block


def _entering(frame: FrameType) -> tuple[_Position, int]:
    """The position of the instruction that enters the context, and how many of that position come before it."""
    code, offset = frame.f_code, frame.f_lasti
    positions = list(code.co_positions())
    position = positions[offset // 2]
    # A frame that waits in an instruction may stand at the inline cache behind it.
    while dis.opname[code.co_code[offset]] == "CACHE":
        offset -= 2
    name = dis.opname[code.co_code[offset]]
    if name not in _ENTERS and name not in _AWAITS:
        raise SourceError(
            f"a trace has to be entered by a with statement; {code.co_filename}:{frame.f_lineno} "
            f"(in {code.co_qualname}) enters it by a call. Write `with model.trace(...) as tracer:`."
        )
    same = [
        at
        for at in range(0, len(code.co_code), 2)
        if at <= offset and dis.opname[code.co_code[at]] in _ENTERS and positions[at // 2] == position
    ]
    return position, max(0, len(same) - 1)


def _text(frame: FrameType, line: int) -> _Text:
    code = frame.f_code
    filename = code.co_filename
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, frame.f_globals)
    if filename in CHECKED_FILENAMES:
        typed = typed_lines(code, line, lines)
        if typed is None:
            raise _no_source(code, line)
        return _Text(typed, filename)
    kept = _texts.get(filename)
    if kept is not None and kept.lines is lines:
        return kept
    if not lines:
        raise _no_source(code, line)
    try:
        text = _Text(lines, filename)
    except SyntaxError as error:
        raise SourceError(
            f"the source of the block at {filename}:{line} does not parse ({error.msg}, line {error.lineno}): the file "
            "was edited since it was imported, or it is not Python source."
        ) from error
    _texts[filename] = text
    if len(_texts) > _FILES_KEPT:
        _texts.popitem(last=False)
    return text


def _no_source(code: CodeType, line: int) -> SourceError:
    looked = {
        "<string>": "the command line of `python -c`",
        "<stdin>": "the history of the interactive prompt (the readline module)",
        "<console>": "the history of the interactive prompt (the readline module)",
    }.get(code.co_filename, "the file of that name and the interpreter's list of lines (linecache)")
    return SourceError(
        f"the source of the block at {code.co_filename}:{line} (in {code.co_qualname}) was not found; looked in "
        f"{looked}. A block runs in another process, so its text is needed: put it into a file, "
        "or into a function in a file that you import."
    )


def _position(node: ast.stmt | ast.expr) -> _Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _cut(text: _Text, item: _Item, code: CodeType) -> BlockSource:
    body = item.statement.body
    first, last = body[0], body[-1]
    first_line, first_column = first.lineno, first.col_offset
    for decorator in getattr(first, "decorator_list", ()):  # a decorated definition begins at its first decorator
        first_line, first_column = min((first_line, first_column), (decorator.lineno, decorator.col_offset))
    last_line, last_column = last.end_lineno or last.lineno, last.end_col_offset or 0
    lines = list(text.lines[first_line - 1 : last_line])
    before = lines[0].encode()[:first_column].decode()
    # A decorator's position begins behind its `@`.
    inline = bool(before.strip().rstrip("@")) or first_column == 0
    if inline:
        lines[-1] = lines[-1].encode()[:last_column].decode()
        lines[0] = lines[0].encode()[first_column:].decode()
    target = item.statement.items[item.index].optional_vars
    return BlockSource(
        text="".join(lines),
        filename=code.co_filename,
        first_line=first_line,
        last_line=last_line,
        first_column=first_column,
        last_column=last_column,
        inline=inline,
        with_line=item.statement.lineno,
        is_last_item=item.index == len(item.statement.items) - 1,
        has_target=target is not None,
        target=mangle(target.id, item.class_name) if isinstance(target, ast.Name) else None,
        class_name=item.class_name,
        flags=code.co_flags & _FUTURES,
    )


def _edited_since_start(filename: str) -> bool:
    try:
        return os.stat(filename).st_mtime > _STARTED
    except (OSError, ValueError):
        return False


def _check_unedited(text: _Text, block: BlockSource, code: CodeType) -> None:
    """Compile a file written since this process began, and compare: the block must be the one that is
    running.

    A statement that still stands at its place may have got another body. `assert` is left out, because test
    runners rewrite it.
    """
    if "assert" in block.text:
        return
    compiled = compile("".join(text.lines), text.filename, "exec", block.flags, dont_inherit=True)
    for inner in nested_codes(compiled):
        same_place = inner.co_qualname == code.co_qualname and inner.co_firstlineno == code.co_firstlineno
        if same_place and same_block(inner, code, block.first_line, block.last_line):
            return
    raise SourceError(
        f"the block at {block.where} is not the one that is running: the file was edited since it was imported. "
        "Import it again (importlib.reload) or restart the program."
    )
