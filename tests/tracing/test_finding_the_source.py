"""The text of a block is found wherever Python code can live, or the error says what to do."""

# ruff: noqa: E701, E702
from __future__ import annotations

import contextlib
import doctest
import importlib.util
import linecache
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from local_trace import trace

import nnsight_async.tracing.source as source_module
from nnsight_async.errors import SourceError
from nnsight_async.tracing import find_block

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}"}


def python(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=text, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def load(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_body_exactly_as_written() -> None:
    with trace() as tracer:
        a = 1
        # a comment

        b = """
  less indented than the block
"""
        (a, b)  # behind
        c = [a, b]
        c.save()  # the last line
    first = test_the_body_exactly_as_written.__code__.co_firstlineno + 2
    lines = Path(__file__).read_text().splitlines(keepends=True)
    assert tracer.source.first_line == first
    assert tracer.source.text == "".join(lines[first - 1 : first + 8])
    assert c == [1, "\n  less indented than the block\n"]


def test_a_body_on_the_statements_own_line_behind_wide_characters() -> None:
    with trace() as tracer: a = "ÄÖ".save(); b = "🙂".save()  # fmt: skip
    assert tracer.source.text == 'a = "ÄÖ".save(); b = "🙂".save()'
    assert (a, b) == ("ÄÖ", "🙂")


def test_the_right_one_of_many() -> None:
    context = trace()
    with contextlib.nullcontext(), contextlib.nullcontext(), context as tracer:
        a = 1
        a.save()
    with contextlib.nullcontext():
        with trace() as inner: b = 2; b.save()  # fmt: skip
    for _ in range(2):
        with trace() as third:
            c = 3
            c.save()
    assert (a, b, c) == (1, 2, 3)
    assert {tracer.source.with_line, inner.source.with_line, third.source.with_line} == {
        test_the_right_one_of_many.__code__.co_firstlineno + line for line in (2, 6, 8)
    }


def test_finding_it_again_is_a_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Any:
        with trace(run=False) as tracer:
            pass
        return tracer.source

    first = find()
    monkeypatch.setattr(source_module, "_find", lambda frame: pytest.fail("searched again"))
    assert find() is first


BLOCK_MODULE = """
from local_trace import trace
def f():
    with trace() as tracer:
        x = 1
        x.save()
    return x
"""

SCRIPT = """
from local_trace import trace
with trace() as tracer:
    x = 20
    y = (x + 1).save()
print("got", y, tracer.skipped)
"""


def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert python(str(script)).stdout == "got 21 True\n"


def test_a_script_without_column_numbers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python("-X", "no_debug_ranges", str(script))
    assert done.stdout == "got 21 True\n", done.stderr


@pytest.mark.parametrize("options", [["-c"], ["-Ic".replace("I", "B")], ["-X", "utf8", "-c"], ["-O", "-c"]])
def test_python_c(options: list[str]) -> None:
    done = python(*options, SCRIPT)
    assert done.stdout == "got 21 True\n", done.stderr


def test_python_c_in_a_function() -> None:
    text = "from local_trace import trace\ndef f():\n    with trace() as t: y = 5; y.save()\n    return y\nprint(f())"
    done = python("-c", text)
    assert done.stdout == "5\n", done.stderr


def test_an_executed_string_has_no_source() -> None:
    with pytest.raises(SourceError, match=r"<string>:2.*python -c.*put it into a file"):
        exec("from local_trace import trace\nwith trace():\n    x = 1\n", {})


def test_an_executed_string_in_python_c_is_not_taken_for_the_command_line() -> None:
    text = "from local_trace import trace\nexec('with trace():\\n    y = 1\\n')\nwith trace():\n    x = 2\n"
    done = python("-c", text)
    assert "SourceError: the source of the block at <string>:1" in done.stderr


def test_a_piped_script_has_no_source() -> None:
    done = python("-", text=SCRIPT)
    if sys.version_info >= (3, 13) and done.returncode == 0:
        assert done.stdout == "got 21 True\n"
    else:
        assert "SourceError: the source of the block at <stdin>:3" in done.stderr
        assert "put it into a file" in done.stderr


def test_a_call_of_enter_is_refused() -> None:
    with pytest.raises(SourceError, match="has to be entered by a with statement"), contextlib.ExitStack() as stack:
        stack.enter_context(trace())


@pytest.mark.parametrize("touch", [False, True])
def test_a_file_edited_after_its_import(tmp_path: Path, touch: bool) -> None:
    path = tmp_path / f"edited_{touch}.py"
    text = BLOCK_MODULE
    path.write_text(text)
    module = load(path, path.stem)
    linecache.clearcache()
    path.write_text("# moved down\n" + text if not touch else text.replace("x = 1", "x = 2"))
    with pytest.raises(SourceError, match="edited since it was imported"):
        module.f()
    path.write_text("def (\n")
    linecache.clearcache()
    with pytest.raises(SourceError, match="does not parse"):
        module.f()
    path.write_text(text + "# a comment behind\n")
    linecache.clearcache()
    assert module.f() == 1


def test_a_module_out_of_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    archive = tmp_path / "library.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped_block.py", BLOCK_MODULE)
    monkeypatch.syspath_prepend(str(archive))
    import zipped_block

    assert zipped_block.f() == 1


def test_a_doctest() -> None:
    def documented() -> None:
        """
        >>> from local_trace import trace
        >>> with trace() as tracer:
        ...     x = 3
        ...     x.save()
        >>> x
        3
        """

    finder = doctest.DocTestFinder()
    [example] = finder.find(documented, "documented", globs={})
    results = doctest.DocTestRunner().run(example)
    assert results.attempted == 3
    assert results.failed == 0


def test_a_notebook_cell() -> None:
    shell_module = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    shell = shell_module.InteractiveShell.instance()
    try:
        shell.run_cell("from local_trace import trace").raise_error()
        shell.run_cell("%precision 3\nwith trace() as tracer:\n    x = 6\n    x.save()\nx").raise_error()
        assert shell.user_ns["x"] == 6
        shell.run_cell(
            "async def f():\n    async with trace() as t: z = 7; z.save()\n    return z\nz = await f()"
        ).raise_error()
        assert shell.user_ns["z"] == 7
        shell.run_cell("async with trace() as t:\n    w = 8\n    w.save()").raise_error()
        assert shell.user_ns["w"] == 8
    finally:
        shell_module.InteractiveShell.clear_instance()


def test_the_text_of_a_line_is_known_without_the_file() -> None:
    from nnsight_async.tracing import source_line

    with trace() as tracer:
        x = 1
        y = 2
    line = tracer.source.first_line
    assert source_line(tracer.program, line + 1).strip() == "y = 2"
    assert source_line(tracer.program, line + 2) == source_line(tracer.program, line - 1) == ""


def test_a_file_that_is_not_there_any_more(tmp_path: Path) -> None:
    path = tmp_path / "gone.py"
    path.write_text("from local_trace import trace\ndef f():\n    with trace():\n        x = 4\n")
    module = load(path, "gone")
    path.unlink()
    linecache.clearcache()
    with pytest.raises(SourceError, match=r"gone.py:3 \(in f\) was not found"):
        module.f()


def test_find_block_of_a_frame_elsewhere() -> None:
    with pytest.raises(SourceError):
        find_block(sys._getframe())
