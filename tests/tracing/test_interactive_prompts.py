"""Blocks typed at a prompt, in a real terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from pathlib import Path

import pytest

pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")

HERE = Path(__file__).parent


class Terminal:
    """A program in a terminal, typed at line by line."""

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        self.text = ""
        self.process, self.file = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execve(arguments[0], arguments, environment)

    def wait_for(self, pattern: str, seconds: float = 20) -> str:
        """Read until `pattern` comes, and take what was read."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            if time.monotonic() > end or not select.select([self.file], [], [], 0.1)[0]:
                if time.monotonic() > end:
                    raise AssertionError(f"no {pattern!r} in {self.text!r}")
                continue
            try:
                self.text += os.read(self.file, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"no {pattern!r} in {self.text!r}") from None
        taken, self.text = self.text[: found.end()], self.text[found.end() :]
        return taken

    def type(self, line: str) -> None:
        os.write(self.file, line.encode() + b"\n")
        time.sleep(0.1)

    def close(self) -> None:
        os.close(self.file)
        os.waitpid(self.process, 0)


def start(tmp_path: Path, *arguments: str, **environment: str) -> Terminal:
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    variables = {
        **kept,
        "HOME": str(tmp_path),
        "TERM": "xterm",
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}",
        **environment,
    }
    terminal = Terminal([sys.executable, *arguments], variables, tmp_path)
    terminal.wait_for(">>> ")
    return terminal


def a_session(terminal: Terminal) -> None:
    terminal.type("from local_trace import trace")
    terminal.wait_for(">>> ")
    for _ in range(2):  # a second block with the same text must be found too
        terminal.type("with trace() as t:")
        terminal.type("x = 20" if sys.version_info >= (3, 13) and "auto" in terminal.__dict__ else "    x = 20")
        terminal.type("    y = (x + 1).save()")
        terminal.type("")
        terminal.wait_for(">>> ")
        terminal.type("print('got', y * 2)")
        terminal.wait_for("got 42")
    terminal.type("def f():")
    terminal.type("    with trace() as t: z = 33; z.save()")
    terminal.type("    return z")
    terminal.type("")
    terminal.type("1 + 1")
    terminal.type("print('called', f() + 1)")
    terminal.wait_for("called 34")


@pytest.mark.parametrize("arguments", [(), ("-i", "-c", "pass")], ids=["python", "python -i"])
def test_the_plain_prompt(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    terminal = start(tmp_path, *arguments, PYTHON_BASIC_REPL="1")
    try:
        a_session(terminal)
    finally:
        terminal.close()


def test_code_interact(tmp_path: Path) -> None:
    terminal = start(tmp_path, "-c", "import readline, code; code.interact()")
    try:
        a_session(terminal)
    finally:
        terminal.close()


@pytest.mark.skipif(sys.version_info < (3, 13), reason="the new prompt came with Python 3.13")
def test_the_new_prompt(tmp_path: Path) -> None:
    terminal = start(tmp_path)
    try:
        terminal.type("from local_trace import trace")
        terminal.type("with trace() as t: x = 20; y = (x + 1).save()")
        terminal.type("")
        terminal.type("print('got', y * 2)")
        terminal.wait_for("got 42")
    finally:
        terminal.close()


def test_without_history_the_error_says_what_to_do(tmp_path: Path) -> None:
    text = "import sys, code; sys.modules['readline'] = None; code.interact()"
    terminal = start(tmp_path, "-c", text)
    try:
        terminal.type("from local_trace import trace")
        terminal.type("with trace() as t: y = 1")
        terminal.type("")
        terminal.wait_for("SourceError.*history")
        terminal.wait_for("put it into a")
    finally:
        terminal.close()
