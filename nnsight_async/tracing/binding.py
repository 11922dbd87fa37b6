"""The values that travel with a block: taken from the caller's frame, pickled, and unpickled in the worker.

The worker may run on another machine, or hold an older version of what the user is editing. So functions and
classes of the user's own modules travel with their code, not as names to import; installed packages are
imported over there.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import site
import sys
import sysconfig
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloud

from nnsight_async.errors import CaptureError
from nnsight_async.tracing.frames import variables_of

__all__ = ["collect", "dumps", "loads"]

_MISSING = object()


def collect(frame: FrameType, reads: Iterable[str]) -> dict[str, Any]:
    """The values of `reads` as the frame's own code would see them.

    A name that the frame does not know is left out: reading it then fails at the block's own line. Builtins
    are left out too, the worker has its own.
    """
    with variables_of(frame) as local:
        return _collect(frame, local, reads)


def _collect(frame: FrameType, local: Mapping[str, Any], reads: Iterable[str]) -> dict[str, Any]:
    code = frame.f_code
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars} if is_function else set()
    values: dict[str, Any] = {}
    for name in reads:
        value: Any
        if name in local:
            value = local[name]
        elif name in known:
            continue  # a local variable without a value; a global of the same name is another variable
        else:
            value = _enclosing(frame, name) if name in code.co_freevars else _MISSING
            if value is _MISSING:
                value = frame.f_globals.get(name, _MISSING)
        if value is not _MISSING and name != "__builtins__":
            values[name] = value
    return values


def _enclosing(frame: FrameType, name: str) -> Any:
    """A variable of the function around a class body, which the class's own namespace does not show."""
    outer = frame.f_back
    while outer is not None:
        if name in outer.f_code.co_cellvars:
            with variables_of(outer) as variables:
                return variables.get(name, _MISSING)
        outer = outer.f_back
    return _MISSING


def dumps(
    values: Mapping[str, Any],
    persistent_id: Callable[[object], object | None],
    *,
    where: str = "the traced block",
) -> bytes:
    """Pickle what a block reads.

    Args:
        values: the values by name.
        persistent_id: gives a reference for objects that the other side has already (the model's modules),
            else None.
        where: `file:line` of the block, for the message.

    Raises:
        CaptureError: names the variable that cannot be pickled, its type, and what in it is the trouble.
    """
    data = dict(values)
    try:
        return _dump(data, persistent_id)
    except Exception as error:  # any object's own reduction may raise anything
        first = error
    try:
        # A module may hold things the block has no use for (a lock, a socket): leave those behind.
        return _dump(data, persistent_id, careful=True)
    except Exception:
        pass
    for name, value in data.items():
        try:
            _dump(value, persistent_id, careful=True)
        except Exception as error:
            path, culprit, reason = _culprit(name, value, error, persistent_id)
            inside = "" if path == name else f"; `{path}`, a {_type_name(culprit)}, is what cannot be pickled"
            raise CaptureError(
                f"{where}: the block reads `{name}` (a {_type_name(value)}), which cannot be sent to the model's "
                f"process{inside} ({type(reason).__name__}: {reason}). Bind what the block needs of it to "
                "a name of its own before the block, and read that name."
            ) from error
    raise CaptureError(f"{where}: the values that the block reads cannot be sent together ({first}).") from first


def loads(data: bytes, persistent_load: Callable[[object], object]) -> dict[str, Any]:
    """Unpickle what `dumps` made; `persistent_load` turns a reference back into the object here."""
    result = _Unpickler(io.BytesIO(data), persistent_load).load()
    assert isinstance(result, dict)
    return result


def _dump(value: object, persistent_id: Callable[[object], object | None], *, careful: bool = False) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, persistent_id, careful).dump(value)
    return buffer.getvalue()


def _culprit(
    path: str,
    value: object,
    error: Exception,
    persistent_id: Callable[[object], object | None],
    depth: int = 4,
) -> tuple[str, object, Exception]:
    """The innermost attribute, item or closure variable that fails by itself, as it would be written in
    Python.
    """
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, types.FunctionType):
        variables = inspect.getclosurevars(value)
        parts = [(name, item) for name, item in {**variables.globals, **variables.nonlocals}.items()]
    elif isinstance(value, types.MethodType):
        parts = [(f"{path}.__self__", value.__self__)]
    elif not isinstance(value, type | ModuleType):
        parts = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for inner_path, inner in parts[:1000] if depth else ():
        if inner is value:
            continue
        try:
            _dump(inner, persistent_id, careful=True)
        except Exception as inner_error:
            return _culprit(inner_path, inner, inner_error, persistent_id, depth - 1)
    return path, value, error


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---- which modules are the user's own

_INSTALLED = frozenset({"nnsight_async", "torch", "vllm", "cloudpickle"})


def _installed_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(getattr(site, "getsitepackages", list)())
    if site.USER_SITE is not None:
        paths.add(site.USER_SITE)
    folders = {os.path.realpath(path) for path in paths if path} | {path for path in paths if path}
    return tuple(folder + os.sep for folder in folders)


_FOLDERS = _installed_folders()
_verdicts: weakref.WeakKeyDictionary[ModuleType, bool] = weakref.WeakKeyDictionary()


def _is_users(module: ModuleType) -> bool:
    """Whether a module is the user's own code rather than an installed package."""
    verdict = _verdicts.get(module)
    if verdict is None:
        verdict = _verdicts[module] = _judge(module)
    return verdict


def _judge(module: ModuleType) -> bool:
    root = module.__name__.partition(".")[0]
    if root in _INSTALLED or root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return False
    path = getattr(module, "__file__", None)
    if path is None:
        folders = list(getattr(module, "__path__", ()))
        if not folders:
            return True  # made by hand, or typed: nowhere to import it from
        path = os.path.join(str(folders[0]), "")
    path = os.path.abspath(path)
    if path.endswith(tuple(_extension_suffixes())):
        return False
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return False
    return not path.startswith(_FOLDERS)


def _extension_suffixes() -> list[str]:
    from importlib.machinery import EXTENSION_SUFFIXES

    return EXTENSION_SUFFIXES


def _defined_by_user(value: object) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and module.__name__ != "__main__" and _is_users(module)


# ---- pickling


class _Pickler(cloudpickle.Pickler):
    """Pickles the user's code by value, and what the other side has by reference."""

    def __init__(
        self,
        file: io.BytesIO,
        persistent_id: Callable[[object], object | None],
        careful: bool,
        states: dict[ModuleType, dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(file, protocol=5)
        self._reference = persistent_id
        self._careful = careful
        # What to send of each module; empty while it is being worked out, so that modules may refer to each
        # other.
        self._states = {} if states is None else states

    def persistent_id(self, value: object) -> object | None:
        return self._reference(value)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, types.FunctionType):
            if _defined_by_user(value):
                return self._dynamic_function_reduce(value)
        elif isinstance(value, type):
            if _defined_by_user(value):
                return _cloud._dynamic_class_reduce(value)
        elif isinstance(value, typing.TypeVar):
            if _defined_by_user(value):
                return _cloud._make_typevar, _cloud._decompose_typevar(value)
        elif isinstance(value, ModuleType) and (value.__name__ == "__main__" or _is_users(value)):
            return self._module(value)
        return super().reducer_override(value)

    def _module(self, module: ModuleType) -> Any:
        state = self._states.get(module)
        if state is None:
            state = {name: item for name, item in vars(module).items() if name not in _MODULE_MACHINERY}
            state = self._without_known(module, state)
            if self._careful:
                self._states[module] = {}
                self._try_each(module, state)
            self._states[module] = state
        return _make_module, (module.__name__, module.__doc__), state, None, None, _fill_module

    def _without_known(self, module: ModuleType, state: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is known not to pickle, so that a module is tried only once in a process."""
        for name, (identity, reason) in _left_behind.get(module, {}).items():
            if name in state and id(state[name]) == identity and self._reference(state[name]) is None:
                del state[name]
                state.setdefault(_LEFT_BEHIND, {})[name] = reason
        return state

    def _try_each(self, module: ModuleType, state: dict[str, Any]) -> None:
        """Leave out what does not pickle by itself."""
        for name, item in list(state.items()):
            try:
                _Pickler(io.BytesIO(), self._reference, True, self._states).dump(item)
            except Exception as error:
                reason = f"a {_type_name(item)}: {error}"
                _left_behind.setdefault(module, {})[name] = id(item), reason
                del state[name]
                state.setdefault(_LEFT_BEHIND, {})[name] = reason


_left_behind: weakref.WeakKeyDictionary[ModuleType, dict[str, tuple[int, str]]] = weakref.WeakKeyDictionary()
_MODULE_MACHINERY = frozenset({"__builtins__", "__loader__", "__spec__", "__cached__"})
_LEFT_BEHIND = "__left_behind__"


def _make_module(name: str, doc: str | None) -> ModuleType:
    return _TravelledModule(name, doc)


def _fill_module(module: ModuleType, state: dict[str, Any]) -> None:
    vars(module).update(state)


class _TravelledModule(ModuleType):
    """A user's module in the worker: what it held, without having been imported there."""

    def __getattr__(self, name: str) -> Any:
        reason = vars(self).get(_LEFT_BEHIND, {}).get(name)
        if reason is not None:
            raise AttributeError(f"{self.__name__}.{name} could not be sent with the block ({reason})")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


# ---- unpickling

_travelled: weakref.WeakSet[type] = weakref.WeakSet()  # classes that unpickling made in this process


class _Unpickler(pickle.Unpickler):
    """Unpickles references through `persistent_load`, and leaves classes of this process as they are."""

    def __init__(self, file: io.BytesIO, persistent_load: Callable[[object], object]) -> None:
        super().__init__(file)
        self._dereference = persistent_load

    def persistent_load(self, reference: Any) -> Any:
        return self._dereference(reference)

    def find_class(self, module: str, name: str) -> Any:
        if module == _cloud.__name__:
            if name == "_class_setstate":
                return _set_class_state
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return _make_class if name == "_make_skeleton_class" else _make_enum
        return super().find_class(module, name)


def _make_class(*arguments: Any) -> type:
    return _note(_cloud._make_skeleton_class, arguments, 4)


def _make_enum(*arguments: Any) -> type:
    return _note(_cloud._make_skeleton_enum, arguments, 5)


def _note(make: Callable[..., type], arguments: tuple[Any, ...], tracker: int) -> type:
    known = arguments[tracker] in _cloud._DYNAMIC_CLASS_TRACKER_BY_ID
    made = make(*arguments)
    if not known:
        _travelled.add(made)
    return made


def _set_class_state(made: type, state: Any) -> type:
    # A saved object comes back with its class's code. The class it was made from must not be changed by that.
    return _cloud._class_setstate(made, state) if made in _travelled else made
