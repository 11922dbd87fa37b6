"""Finding the text of code that was typed rather than written to a file.

The interactive prompts of Python 3.11 and 3.12, `code.interact` and `python -c` keep no source. The line
editor's history and the process's own command line usually still hold it. Such text is a guess until it has
been compiled again and gives the very instructions that are running, so nothing is returned that was not
checked that way.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import warnings
from collections.abc import Iterator
from types import CodeType

from nnsight_async.tracing.bytecode import nested_codes, same_code

__all__ = ["CHECKED_FILENAMES", "typed_lines"]

CHECKED_FILENAMES = frozenset({"<stdin>", "<console>", "<string>"})
"""Names that many different texts share: a text found under one of them has to be checked."""

_LOOK_BACK = 2000  # lines of history to search
_LOOK_AHEAD = 60  # lines that may follow the block within one typed statement


def typed_lines(code: CodeType, line: int, listed: list[str]) -> list[str] | None:
    """The source lines that `code` was compiled from, or None.

    Args:
        code: the running code, whose file name is one of `CHECKED_FILENAMES`.
        line: the line of the with statement, counted from 1 within what was typed.
        listed: lines that the interpreter itself lists under that name; tried first.
    """
    modes = ("exec",) if code.co_filename == "<string>" else ("single", "exec")
    for text in _whole_texts(code, listed):
        if _compiles_to(text, code, modes):
            return text.splitlines(keepends=True)
    if code.co_filename == "<string>":
        return None
    return _from_history(code, line, modes)


def _whole_texts(code: CodeType, listed: list[str]) -> Iterator[str]:
    if listed:
        yield "".join(listed)
    if code.co_filename == "<string>":
        arguments = sys.orig_argv
        for index, argument in enumerate(arguments[1:], 1):
            # Short options may be joined (`-Ic "..."`), and the text may follow at once (`-c"..."`).
            if argument.startswith("-") and not argument.startswith("--") and "c" in argument:
                attached = argument[argument.index("c") + 1 :]
                for text in (attached or "".join(arguments[index + 1 : index + 2]),):
                    yield text + "\n"
                    yield textwrap.dedent(text) + "\n"


def _from_history(code: CodeType, line: int, modes: tuple[str, ...]) -> list[str] | None:
    history = _history()
    last = max((where[1] or 0 for inner in nested_codes(code) for where in inner.co_positions()), default=line)
    # The with statement of the newest matching entry: walk back over the lines that could be it.
    for index in range(len(history) - 1, -1, -1):
        if "with" not in history[index] or index - line + 1 < 0:
            continue
        start = index - line + 1
        for end in range(start + max(last, line), min(start + last + _LOOK_AHEAD, len(history)) + 1):
            text = "\n".join(history[start:end]) + "\n"
            if _compiles_to(text, code, modes):
                return text.splitlines(keepends=True)
    return None


def _history() -> list[str]:
    readline = sys.modules.get("readline")  # never imported here: that alone changes how a terminal behaves
    if readline is None:
        return []
    count = int(readline.get_current_history_length())
    entries = [readline.get_history_item(n) for n in range(max(1, count - _LOOK_BACK + 1), count + 1)]
    # Editors that keep a typed statement as one entry give several lines at once.
    return [part for entry in entries for part in (entry or "").split("\n")]


def _compiles_to(text: str, code: CodeType, modes: tuple[str, ...]) -> bool:
    future = code.co_flags & 0x1FF0000  # the `from __future__` switches in force where it was typed
    for mode in modes:
        for flags in (0, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    compiled = compile(text, code.co_filename, mode, flags | future, dont_inherit=True)
            except (SyntaxError, ValueError):
                continue
            if any(same_code(inner, code) for inner in nested_codes(compiled)):
                return True
    return False
