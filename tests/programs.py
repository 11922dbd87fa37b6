"""A small language of blocks, with two meanings: Python text for the engine, and a walk over HuggingFace with hooks.

A program is a tuple of statements. `source` writes it down as an importable file whose `run` traces it; `expect` runs
it against the same checkpoint in transformers. The second meaning shares nothing with the package: a program is a
generator there, resumed by ordinary forward hooks, and the keys and values are HuggingFace's own cache, so an edit at
one step reaches the later ones as it does in the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from reference import Reference
from torch import Tensor

LAYERS = 4
WIDTH = 64
#: What the programs edit with beside numbers: a vector that stands in a variable around the block.
BUMP = torch.linspace(-2.0, 2.0, WIDTH)

Kind = Literal["attention", "post_norm", "mlp_input", "mlp", "layer", "norm", "logits", "samples"]
_IN_A_LAYER: tuple[Kind, ...] = ("attention", "post_norm", "mlp_input", "mlp", "layer")
_AFTER_THEM: tuple[Kind, ...] = ("norm", "logits", "samples")


# The language.


@dataclass(frozen=True)
class Place:
    """A location; `order` says when the forward pass comes to it."""

    kind: Kind
    layer: int = 0

    @property
    def order(self) -> int:
        if self.kind in _IN_A_LAYER:
            return self.layer * len(_IN_A_LAYER) + _IN_A_LAYER.index(self.kind)
        return LAYERS * len(_IN_A_LAYER) + _AFTER_THEM.index(self.kind)

    @property
    def text(self) -> str:
        """The location itself: a layer's is a pair, all others are one tensor."""
        layer = f"model.model.layers[{self.layer}]"
        return {
            "attention": f"{layer}.self_attn.output",
            "post_norm": f"{layer}.post_attention_layernorm.output[0]",
            "mlp_input": f"{layer}.mlp.input",
            "mlp": f"{layer}.mlp.output",
            "layer": f"{layer}.output",
            "norm": "model.model.norm.output[0]",
            "logits": "model.logits",
            "samples": "model.samples",
        }[self.kind]

    @property
    def tensor(self) -> str:
        """The one tensor that HuggingFace has there as well."""
        return f"sum({self.text})" if self.kind == "layer" else self.text


#: Parts of a tensor of rows that a program reads: what stands behind the location, and what it means.
PARTS: dict[str, Callable[[Tensor], Any]] = {
    "": lambda t: t,
    "[-1]": lambda t: t[-1],
    "[:, 3:9]": lambda t: t[:, 3:9],
    ".T": lambda t: t.T,
    "[-1].norm()": lambda t: t[-1].norm(),
    ".argmax(-1)": lambda t: t.argmax(-1),
    ".item()": lambda t: t.item(),
    "[1]": lambda t: t[1],  # an IndexError wherever there is one row
}
#: Where a value that was read goes.
Into = Literal["name", "list", "item", "dict", "later"]


@dataclass(frozen=True)
class Read:
    """Read a part of a location, and save it. Of a layer, `pair` keeps the pair that the engine has there."""

    name: str
    place: Place
    part: str = ""
    into: Into = "list"
    pair: bool = False


@dataclass(frozen=True)
class SaveLater:
    """Save a value that was read into a variable some statements ago."""

    name: str


@dataclass(frozen=True)
class Both:
    """Two locations in one expression."""

    name: str
    first: Place
    second: Place
    into: Into = "list"


@dataclass(frozen=True)
class Sweep:
    """The streams that leave the layers from `first` on, by a loop or in one expression over the layers."""

    name: str
    first: int
    comprehension: bool


@dataclass(frozen=True)
class AddUp:
    """Add a location's last row to a saved tensor, in place."""

    place: Place


How = Literal["add", "bump", "zero", "scale", "replace", "misshape", "column", "ban", "force"]


@dataclass(frozen=True)
class Edit:
    """Change what is at a location; `amount` and `index` are what the way of changing it takes."""

    place: Place
    how: How
    amount: float = 0.0
    index: int = 0


@dataclass(frozen=True)
class Stop:
    """End the request."""


@dataclass(frozen=True)
class Fail:
    """Raise an error of the block's own."""


@dataclass(frozen=True)
class When:
    """A statement for one step of a loop."""

    step: int
    body: Statement


@dataclass(frozen=True)
class Tried:
    """A statement whose error is caught, and its type's name saved."""

    body: Statement


@dataclass(frozen=True)
class Loop:
    """A loop over steps; `text` is what the loop runs over, `steps` what that means (open loops: very many)."""

    text: str
    steps: Sequence[int]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Result:
    """Save the request's result, as it is or (`now`) what is in it, for which the block has to wait."""

    now: bool


Statement = Read | SaveLater | Both | Sweep | AddUp | Edit | Stop | Fail | When | Tried | Loop | Result


@dataclass(frozen=True)
class Program:
    """A block. `streamed`: its outputs are taken from the stream; else `async with` waits and writes back."""

    body: tuple[Statement, ...]
    streamed: bool


@dataclass(frozen=True)
class Request:
    """One prompt of a batch."""

    prompt: tuple[int, ...]
    max_tokens: int
    program: Program


def statements(body: Sequence[Statement]) -> Iterator[Statement]:
    """All statements of a program, those inside others too."""
    for statement in body:
        yield statement
        if isinstance(statement, Loop):
            yield from statements(statement.body)
        elif isinstance(statement, When | Tried):
            yield from statements([statement.body])


# The first meaning: text.

_OPENINGS = {"acts": "acts = list().save()", "kept": "kept = dict().save()", "told": "told = list().save()"}
_OPENINGS |= {"total": f"total = torch.zeros({WIDTH}).save()", "items": "items = []"}

_STREAMED = """\
import torch


async def run(model, prompt, settings, bump, seen):
    with model.trace(prompt, **settings) as tracer:
{body}
    seen["tracer"] = tracer
    async for output in tracer.backend:
        seen["outputs"].append(output)
"""

_WAITED = """\
import torch


async def run(model, prompt, settings, bump, seen):
    try:
        async with model.trace(prompt, **settings) as tracer:
{body}
    finally:
        seen["tracer"] = tracer
        seen["names"] = dict(locals())
"""


def variables(program: Program) -> list[str]:
    """The containers that a program fills, which it makes before anything else."""
    names: dict[str, None] = {}
    for statement in statements(program.body):
        if isinstance(statement, Sweep):
            names["acts"] = None
        elif isinstance(statement, AddUp):
            names["total"] = None
        elif isinstance(statement, Tried):
            names["told"] = None
        elif isinstance(statement, Read | Both) and statement.into in ("list", "item", "dict"):
            names[{"list": "acts", "item": "items", "dict": "kept"}[statement.into]] = None
    return list(names)


def source(program: Program) -> str:
    """The program as the text of a module with one coroutine, `run`."""
    lines = [_OPENINGS[name] for name in variables(program)]
    for statement in program.body:
        lines += _lines(statement)
    template, depth = (_STREAMED, 2) if program.streamed else (_WAITED, 3)
    return template.format(body="\n".join("    " * depth + line for line in lines or ["pass"]))


def _lines(statement: Statement) -> list[str]:
    match statement:
        case Read(name, place, part, into, pair):
            return [_stored(name, place.text if pair else place.tensor + part, into)]
        case SaveLater(name):
            return [f"{name} = later_{name}.save()"]
        case Both(name, first, second, into):
            return [_stored(name, f"torch.stack([{first.tensor}[-1], {second.tensor}[-1]])", into)]
        case Sweep(_, first, comprehension):
            layers = f"for layer in model.model.layers[{first}:]"
            if comprehension:
                return [f"acts.append([sum(layer.output) {layers}])"]
            return [f"{layers}:", "    acts.append(sum(layer.output))"]
        case AddUp(place):
            return [f"total += {place.tensor}[-1]"]
        case Edit():
            return _edit_lines(statement)
        case Stop():
            return ["tracer.stop()"]
        case Fail():
            return ['raise ValueError("asked for")']
        case When(step, body):
            return [f"if step == {step}:", *_indented(_lines(body))]
        case Tried(body):
            caught = ["except Exception as error:", "    told.append(type(error).__name__)"]
            return ["try:", *_indented(_lines(body)), *caught]
        case Loop(text, _, body):
            inner = [line for one in body for line in _lines(one)]
            return [f"for step in {text}:", *_indented(inner or ["pass"])]
        case Result(now):
            return ["tokens = list(tracer.result.outputs[0].token_ids).save()" if now else "out = tracer.result.save()"]


def _stored(name: str, value: str, into: Into) -> str:
    return {
        "name": f"{name} = {value}.save()" if not value.startswith("sum(") else f"{name} = ({value}).save()",
        "list": f"acts.append({value})",
        "item": f"items.append(({value}).save())",
        "dict": f'kept["{name}"] = {value}',
        "later": f"later_{name} = {value}",
    }[into]


def _edit_lines(edit: Edit) -> list[str]:
    place, amount, index = edit.place, edit.amount, edit.index
    if place.kind == "samples":
        return [f"model.samples = torch.full_like(model.samples, {index})"]
    if place.kind == "logits":
        target = {"ban": "[0, model.logits[0].argmax()] = -1e9", "force": f"[:, {index}] = 1e9"}
        return [f"model.logits{target.get(edit.how, f'[:, {index}] += {amount}')}"]
    if edit.how in ("add", "bump"):
        what = "bump" if edit.how == "bump" else amount
        return [f"{place.text}[0][:] += {what}" if place.kind == "layer" else f"{place.text}[:] += {what}"]
    change = {"zero": f"[:, {index}] = 0", "scale": f"[-1] *= {amount}"}.get(edit.how)
    if place.kind == "layer":
        # Not linear in the hidden states alone: both parts of the stream are changed.
        if change is not None:
            return [f"for part in {place.text}:", f"    part{change}"]
        hidden = f"{place.text}[0][:, :3]" if edit.how == "misshape" else f"{place.text}[0] + {amount}"
        return [f"{place.text} = ({hidden}, {place.text}[1])"]
    if change is not None:
        return [f"{place.text}{change}"]
    return [f"{place.text} = {place.text}{'[:, :3]' if edit.how == 'misshape' else f' * {amount}'}"]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# The second meaning: HuggingFace, with hooks.


class OutOfOrderError(Exception):
    """The reference's own word for a place or a step that has passed."""


class _Stopped(BaseException):
    """Leaves a program that stops its request."""


@dataclass(frozen=True, eq=False)
class Stream:
    """A residual stream that the program keeps as the engine's pair, whose sum it is."""

    value: Tensor


#: Stands for the request's result until it is known.
RESULT = "the result"


@dataclass
class Expected:
    """What a request should give.

    `saves` are the values at the end and `snapshots` those after each step that yields an output. A request that
    `failed` (with a type's name) yields none for the step it failed at. `tie`: the choice of a token was too close to
    be compared.
    """

    saves: dict[str, Any] = field(default_factory=dict)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    failed: str | None = None
    stopped: bool = False
    cut_short: bool = False
    tie: bool = False


@torch.no_grad()
def expect(reference: Reference, request: Request, gap: float) -> Expected:
    """Run a request greedily in HuggingFace with its program in hooks, one forward pass a step.

    A token whose logit is ahead of the next one by less than `gap`, as a fraction of the largest, is a tie.
    """
    run, expected = _Run(request.program), Expected()
    ids, past = torch.tensor([request.prompt]), None
    with _hooks(reference, run):
        for step in range(request.max_tokens):
            run.begin(step)
            output = reference.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = output.past_key_values
            logits = output.logits[:, -1]
            edited = run.visit(Place("logits").order, logits)
            expected.tie = expected.tie or _near_tie(logits, gap) or _near_tie(edited, gap)
            ids = run.visit(Place("samples").order, edited.argmax(-1, keepdim=True))
            if run.failed is not None:
                break
            expected.tokens.append(int(ids))
            if run.stopped:
                break
            expected.snapshots.append(run.snapshot())
    if run.waiting == "result":
        run.resume(expected.tokens)
    if run.failed is None:  # the last output has what is saved at the very end
        expected.snapshots[len(expected.tokens) - 1 :] = [run.snapshot(expected.tokens)]
    expected.saves = run.snapshot(expected.tokens)
    expected.failed, expected.stopped = run.failed, run.stopped
    expected.cut_short = isinstance(run.waiting, _Step)
    return expected


def _near_tie(logits: Tensor, gap: float) -> bool:
    first, second = logits[0].topk(2).values.tolist()
    scale = float(logits[logits.abs() < 1e6].abs().max())
    return bool(first - second < gap * scale)


def _hooks(reference: Reference, run: _Run) -> ExitStack:
    """Hooks that show a run each module's rows as they come, and put back what it makes of them."""
    stack = ExitStack()

    def after(place: Place) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (run.visit(place.order, output[0][0])[None], *output[1:])
            return run.visit(place.order, output[0])[None]

        return hook

    def before(place: Place) -> Callable[..., Any]:
        return lambda module, args: (run.visit(place.order, args[0][0])[None],)

    for index, layer in enumerate(reference.layers):
        parts: dict[Kind, Any] = {"attention": layer.self_attn, "post_norm": layer.post_attention_layernorm}
        for kind, module in {**parts, "mlp": layer.mlp, "layer": layer}.items():
            stack.enter_context(module.register_forward_hook(after(Place(kind, index))))
        stack.enter_context(layer.mlp.register_forward_pre_hook(before(Place("mlp_input", index))))
    stack.enter_context(reference.model.base_model.norm.register_forward_hook(after(Place("norm"))))
    return stack


@dataclass(frozen=True)
class _Step:
    """What a run waits for between steps."""

    number: int


#: A run waits for a place (its order), a step, or the result, and is sent nothing but the result.
_Wait = int | _Step | Literal["result"]
_Going = Generator[_Wait, Any, Any]


class _Run:
    """A program going on beside HuggingFace's forward passes.

    A place is shown as a copy, which the program reads and edits, and the model goes on with a copy of that: so what
    is kept of a place has the edits that were made while it was shown, and nothing that comes after.
    """

    def __init__(self, program: Program) -> None:
        self.saves: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        self.failed: str | None = None
        self.stopped = False
        self.waiting: _Wait | None = _Step(0)
        self._step = 0
        self._position = -1
        self._shown = torch.empty(0)
        self._going = self._program(program)

    # The side of the forward pass.

    def begin(self, step: int) -> None:
        self._step, self._position = step, -1
        if isinstance(self.waiting, _Step) and self.waiting.number <= step:
            self.resume()

    def visit(self, order: int, value: Tensor) -> Tensor:
        if self.waiting != order:
            return value
        self._position, self._shown = order, value.clone()
        self.resume()
        return self._shown.clone()

    def resume(self, value: Any = None) -> None:
        self.waiting = None
        try:
            self.waiting = self._going.send(value)
        except StopIteration:
            pass
        except _Stopped:
            self.stopped = True
        except Exception as error:
            self.failed = type(error).__name__

    def snapshot(self, result: Any = None) -> dict[str, Any]:
        """The saved values as they are now, with the result if there is one."""
        saves = copy.deepcopy(self.saves)
        if saves.get("out") == RESULT:
            del saves["out"]
            if result is not None:
                saves["out"] = list(result)
        return saves

    # The side of the program.

    def _program(self, program: Program) -> _Going:
        for name in variables(program):
            self.variables[name] = {"kept": {}, "total": torch.zeros(WIDTH)}.get(name, [])
            if name != "items":
                self.saves[name] = self.variables[name]
        for statement in program.body:
            yield from self._statement(statement, None)

    def _statement(self, statement: Statement, step: int | None) -> _Going:
        match statement:
            case Read(name, place, part, into, pair):
                shown = yield from self._at(place)
                if pair:
                    self._store(name, Stream(shown), into)
                else:
                    self._store(name, PARTS[part](self._own(place, shown)), into)
            case SaveLater(name):
                if f"later_{name}" not in self.variables:
                    raise NameError(name)
                self.saves[name] = self.variables[f"later_{name}"]
            case Both(name, first, second, into):
                row = self._own(first, (yield from self._at(first)))[-1]
                other = self._own(second, (yield from self._at(second)))[-1]
                self._store(name, torch.stack([row, other]), into)
            case Sweep(_, first, comprehension):
                streams: list[Tensor] = [] if comprehension else self.variables["acts"]
                for index in range(first, LAYERS):
                    shown = yield from self._at(Place("layer", index))
                    streams.append(shown.clone())
                if comprehension:
                    self.variables["acts"].append(streams)
            case AddUp(place):
                shown = yield from self._at(place)
                self.variables["total"] += shown[-1]
            case Edit(place):
                self._edit(statement, (yield from self._at(place)))
            case Stop():
                raise _Stopped
            case Fail():
                raise ValueError
            case When(number, body):
                if step == number:
                    yield from self._statement(body, step)
            case Tried(body):
                try:
                    yield from self._statement(body, step)
                except Exception as error:
                    self.variables["told"].append(type(error).__name__)
            case Loop(_, steps, body):
                for number in steps:
                    if number < self._step:
                        raise OutOfOrderError(number)
                    if number > self._step:
                        yield _Step(number)
                    for inner in body:
                        yield from self._statement(inner, number)
            case Result(now):
                if now:
                    self.saves["tokens"] = list((yield "result"))
                else:
                    self.saves["out"] = RESULT

    def _at(self, place: Place) -> Generator[_Wait, Any, Tensor]:
        if place.order < self._position:
            raise OutOfOrderError(place)
        if place.order > self._position:
            yield place.order
        return self._shown

    def _own(self, place: Place, shown: Tensor) -> Tensor:
        """A layer's sum is a tensor of the program's own; the others are shown as they are."""
        return shown.clone() if place.kind == "layer" else shown

    def _store(self, name: str, value: Any, into: Into) -> None:
        match into:
            case "name":
                self.saves[name] = value
            case "list":
                self.variables["acts"].append(value)
            case "item":
                self.variables["items"].append(value)
                self.saves["items"] = self.variables["items"]
            case "dict":
                self.variables["kept"][name] = value
            case "later":
                self.variables[f"later_{name}"] = value

    def _edit(self, edit: Edit, shown: Tensor) -> None:
        match edit.how:
            case _ if edit.place.kind == "samples":
                shown.fill_(edit.index)
            case "ban":
                shown[0, shown[0].argmax()] = -1e9
            case "force":
                shown[:, edit.index] = 1e9
            case "column":
                shown[:, edit.index] += edit.amount
            case "add":
                shown += edit.amount
            case "bump":
                shown += BUMP
            case "zero":
                shown[:, edit.index] = 0
            case "scale":
                shown[-1] *= edit.amount
            case "replace":
                shown.copy_(shown + edit.amount if edit.place.kind == "layer" else shown * edit.amount)
            case "misshape":
                raise ValueError(edit.place)
