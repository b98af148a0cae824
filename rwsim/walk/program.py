"""A rule's `update` as a straight-line program, so that a fast engine needs to know operations, not optimizers.

`update` is traced once on symbols. What depends on coordinates becomes array instructions; what depends on hyperparameters
and the step only becomes a coefficient, evaluated beforehand in float64 for every config. The gradient's share of the update
is traced from the same `update`: parameter and decay at zero, the same roots and signs (as `reference.GradientPart`). A buffer
that never sees the parameter serves both; one that does gets a twin that has seen gradients only, if the share needs it.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from rwsim.errors import Unavailable
from rwsim.optimizers.rule import UpdateRule
from rwsim.walk.job import Job

TWIN = "_of_grad"
# What a program, and the functions emitted for one, call their own.
_TAKEN = re.compile(r"[bct]\d+|grad|param|state|fixed|varying|plane|tl|load|store|TINY")
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
}  # fmt: skip


class Expr:
    """A node of the trace. `array`: varies over coordinates; otherwise it is a function of hyperparameters and step."""

    __slots__ = ("args", "array", "op", "order", "trace")

    def __init__(self, trace: "_Trace", op: str, args: tuple[Any, ...], array: bool, order: int) -> None:
        self.trace, self.op, self.args, self.array, self.order = trace, op, args, array, order

    def __add__(self, other: Any) -> "Expr":
        return self.trace.add(self, other)

    def __radd__(self, other: Any) -> "Expr":
        return self.trace.add(other, self)

    def __sub__(self, other: Any) -> "Expr":
        return self.trace.sub(self, other)

    def __rsub__(self, other: Any) -> "Expr":
        return self.trace.sub(other, self)

    def __mul__(self, other: Any) -> "Expr":
        return self.trace.mul(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Expr":
        return self.trace.div(self, other)

    def __rtruediv__(self, other: Any) -> "Expr":
        return self.trace.div(other, self)

    def __neg__(self) -> "Expr":
        return self.trace.mul(-1.0, self)

    def __pos__(self) -> "Expr":
        return self

    def __pow__(self, power: Any) -> "Expr":
        return self.trace.pow(self, power)

    def __rpow__(self, base: Any) -> "Expr":
        return self.trace.pow(base, self)

    def __bool__(self) -> bool:
        raise TypeError("it decides by a value")


class _Trace:
    """Makes nodes: equal ones once, constants folded, scalars gathered in front of products."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[Any, ...], Expr] = {}

    def node(self, op: str, *args: Any, array: bool | None = None) -> Expr:
        key = (op, *(id(a) if isinstance(a, Expr) else a for a in args))
        if key not in self.nodes:
            varies = any(isinstance(a, Expr) and a.array for a in args) if array is None else array
            self.nodes[key] = Expr(self, op, args, varies, len(self.nodes))
        return self.nodes[key]

    def lift(self, value: Any) -> Expr:
        if isinstance(value, Expr):
            return value
        return self.node("const", float(value))

    @staticmethod
    def _ordered(a: Expr, b: Expr) -> tuple[Expr, Expr]:
        return (a, b) if a.order <= b.order else (b, a)

    def _scalar(self, op: str, a: Expr, b: Expr) -> Expr:
        """A node, or a constant where both are."""
        return self.lift(_OPERATIONS[op](a.args[0], b.args[0])) if a.op == b.op == "const" else self.node(op, a, b)

    def add(self, a: Any, b: Any) -> Expr:
        a, b = self._ordered(self.lift(a), self.lift(b))
        for x, y in ((a, b), (b, a)):
            if _is(x, 0.0):
                return y
        return self._scalar("add", a, b)

    def sub(self, a: Any, b: Any) -> Expr:
        a, b = self.lift(a), self.lift(b)
        if _is(b, 0.0):
            return a
        if _is(a, 0.0):
            return self.mul(-1.0, b)
        return self._scalar("sub", a, b)

    def mul(self, a: Any, b: Any) -> Expr:
        a, b = self._ordered(self.lift(a), self.lift(b))
        for x, y in ((a, b), (b, a)):
            if _is(x, 0.0):
                return x
            if _is(x, 1.0):
                return y
        if a.array and b.array:
            # s x * y = s (x y): the scalars of a product meet in one coefficient.
            for x, y in ((a, b), (b, a)):
                if (split := _scaled(x)) is not None:
                    return self.mul(split[0], self.mul(split[1], y))
        elif a.array or b.array:
            scalar, array = (b, a) if a.array else (a, b)
            if (split := _scaled(array)) is not None:
                return self.mul(self.mul(scalar, split[0]), split[1])
            return self.node("mul", scalar, array)
        return self._scalar("mul", a, b)

    def div(self, a: Any, b: Any) -> Expr:
        a, b = self.lift(a), self.lift(b)
        if _is(a, 0.0):
            return a
        if _is(b, 1.0):
            return a
        if not b.array:
            if a.array:
                return self.mul(self.div(1.0, b), a)
            return self._scalar("div", a, b)
        if (split := _scaled(b)) is not None:
            return self.div(self.div(a, split[0]), split[1])
        if b.op == "sqrt":
            return self.mul(a, self.node("rsqrt", *b.args))
        if (split := _scaled(a)) is not None:
            return self.mul(split[0], self.div(split[1], b))
        return self.node("div", a, b)

    def pow(self, base: Any, power: Any) -> Expr:
        base, power = self.lift(base), self.lift(power)
        if base.array:
            if power.op != "const" or power.args[0] not in (1.0, 2.0, 3.0, 4.0):
                raise TypeError("it takes a power other than 1, 2, 3, 4 (roots are xp.sqrt)")
            result = base
            for _ in range(int(power.args[0]) - 1):
                result = self.mul(result, base)
            return result
        if power.array:
            raise TypeError("it has an array in an exponent")
        return self._scalar("pow", base, power)

    def sqrt(self, x: Any) -> Expr:
        x = self.lift(x)
        if not x.array:
            return self.pow(x, 0.5)
        if (split := _scaled(x)) is not None:
            return self.mul(self.pow(split[0], 0.5), self.sqrt(split[1]))
        return self.node("sqrt", x)

    def sign(self, x: Any) -> Expr:
        x = self.lift(x)
        if not x.array:
            raise TypeError("it takes the sign of a scalar")
        return self.node("sign", x)


def _is(x: Expr, value: float) -> bool:
    return x.op == "const" and bool(x.args[0] == value)


def _scaled(x: Expr) -> tuple[Expr, Expr] | None:
    """(s, y) of an array s y with a scalar s."""
    return x.args if x.op == "mul" and not x.args[0].array and x.args[1].array else None


class _Taping:
    """An `xp` that remembers roots and signs."""

    def __init__(self, trace: _Trace) -> None:
        self.trace, self.tape = trace, list[Expr]()

    def sqrt(self, x: Any) -> Expr:
        self.tape.append(self.trace.sqrt(x))
        return self.tape[-1]

    def sign(self, x: Any) -> Expr:
        self.tape.append(self.trace.sign(x))
        return self.tape[-1]


class _Replaying:
    def __init__(self, tape: Iterable[Expr]) -> None:
        self.tape = iter(tape)

    def sqrt(self, x: Any) -> Expr:
        return next(self.tape)

    sign = sqrt


@dataclass(frozen=True)
class Instruction:
    """target = op(args); an argument is the name of an array, of a coefficient ("c0", ...), or a number."""

    target: str
    op: str
    args: tuple[str | float, ...]


@dataclass(frozen=True)
class Program:
    """One step of a rule.

    Attributes:
        rule: Its name.
        buffers: Arrays carried from step to step, zero at first: the rule's own and the twins that are needed.
        body: Instructions in order; ops are add, sub, mul, div (of an array), sqrt, rsqrt, sign. Inputs are ``grad``,
            ``param`` and the buffers.
        param: Name of the new parameter.
        new: Name of each buffer's new value.
        part: Name of the gradient's share of the update (a name of an array, or the number 0.0).
        coefficients: Scalar of each "c<i>": see `evaluate`.
    """

    rule: str
    buffers: tuple[str, ...]
    body: tuple[Instruction, ...]
    param: str | float
    new: tuple[str | float, ...]
    part: str | float
    coefficients: tuple[Expr, ...]

    def evaluate(self, hyper: Mapping[str, Any], step: Any) -> list[Any]:
        """Values of the coefficients.

        Args:
            hyper: Name -> number or array; a pair as a tuple of them.
            step: 1 at the first step; number or array.
        """
        known: dict[int, Any] = {}

        def value(x: Expr) -> Any:
            if id(x) not in known:
                if x.op == "const":
                    known[id(x)] = x.args[0]
                elif x.op == "step":
                    known[id(x)] = step
                elif x.op == "hyper":
                    name, position = x.args
                    known[id(x)] = hyper[name] if position is None else hyper[name][position]
                else:
                    known[id(x)] = _OPERATIONS[x.op](*(value(y) for y in x.args))
            return known[id(x)]

        return [value(x) for x in self.coefficients]

    def varies(self, scheduled: Iterable[str]) -> list[bool]:
        """Whether each coefficient changes from step to step, given the hyperparameters that have a schedule."""
        names = set(scheduled)

        def moves(x: Any) -> bool:
            return isinstance(x, Expr) and (x.op == "step" or (x.op == "hyper" and x.args[0] in names) or any(map(moves, x.args)))

        return [moves(x) for x in self.coefficients]


def trace(rule: type[UpdateRule], zeros: frozenset[str] = frozenset()) -> Program:
    """The program of a rule whose hyperparameters named in `zeros` are 0 (for one of a pair: ``"betas[0]"``).

    Raises:
        Unavailable: The update does something that is not an operation on coordinates.

    Example:
        >>> from rwsim.optimizers import SGDM
        >>> for line in trace(SGDM, frozenset({"momentum"})).body[:2]: print(line.target, line.op, line.args)
        t0 mul ('c0', 'param')
        t1 add ('grad', 't0')
    """
    return _traced(rule, zeros)  # type: ignore[arg-type]  # mypy takes a class for unhashable


def untraceable(rule: type[UpdateRule]) -> str:
    """What keeps a rule from being traced, as an engine's `lacks` says it, or nothing."""
    try:
        trace(rule)
    except Unavailable as error:
        return f"rule {rule.name}: {error}"
    return ""


@cache
def _traced(rule: type[UpdateRule], zeros: frozenset[str]) -> Program:
    if taken := [name for name in rule.state if _TAKEN.fullmatch(name)]:
        raise Unavailable(f"the update of {rule.name} cannot be traced: its buffer {taken[0]} has a name of the trace's own; rename it.")
    maker = _Trace()
    grad, param, step = maker.node("array", "grad", array=True), maker.node("array", "param", array=True), maker.node("step")

    def leaf(name: str, position: int | None) -> Expr:
        label = name if position is None else f"{name}[{position}]"
        return maker.lift(0.0) if label in zeros else maker.node("hyper", name, position)

    def symbol(name: str, default: Any) -> Any:
        return tuple(leaf(name, i) for i in range(len(default))) if isinstance(default, tuple) else leaf(name, None)

    hyper = SimpleNamespace(**{name: symbol(name, default) for name, default in rule.hyper.items()})
    without_decay = SimpleNamespace(**{**vars(hyper), "weight_decay": maker.lift(0.0)})
    buffers = {name: maker.node("array", name, array=True) for name in rule.state}
    taping = _Taping(maker)
    try:
        new = rule.update(grad, SimpleNamespace(param=param, step=step, **buffers), hyper, taping)
        # Every buffer is taken to serve both until its two traces differ.
        twins: set[str] = set()
        while True:
            seen = {name: maker.node("array", name + TWIN, array=True) if name in twins else buffers[name] for name in rule.state}
            state = SimpleNamespace(param=maker.lift(0.0), step=step, **seen)
            part = rule.update(grad, state, without_decay, _Replaying(taping.tape))
            differ = {name for name in rule.state if maker.lift(part[name]) is not maker.lift(new[name])}
            if differ <= twins:
                break
            twins |= differ
    except (TypeError, AttributeError, StopIteration, ZeroDivisionError, OverflowError) as error:
        raise Unavailable(f"the update of {rule.name} cannot be traced: {error}; walk it with engine reference.") from error
    outputs = {"param": maker.lift(new["param"]), "part": maker.lift(part["param"])}
    outputs |= {name: maker.lift(new[name]) for name in rule.state}
    carried = {name + TWIN: maker.lift(part[name]) for name in twins}
    # A twin counts only if the share depends on it, at once or through another twin.
    needed: set[str] = set()
    while (
        more := {leaf for root in (outputs["part"], *(carried[n] for n in needed)) for leaf in _leaves(root) if leaf in carried}
    ) - needed:
        needed |= more
    outputs |= {name: carried[name] for name in carried if name in needed}
    return _assemble(rule.name, outputs)


def _leaves(x: Any) -> set[str]:
    if not isinstance(x, Expr):
        return set()
    return {x.args[0]} if x.op == "array" else set().union(*(_leaves(y) for y in x.args)) if x.args else set()


def _assemble(name: str, outputs: dict[str, Expr]) -> Program:
    body: list[Instruction] = []
    coefficients: list[Expr] = []
    names: dict[int, str | float] = {}

    def place(x: Expr) -> str | float:
        if id(x) in names:
            return names[id(x)]
        if x.op == "const":
            return x.args[0]
        if x.op == "array":
            return x.args[0]
        if not x.array:
            names[id(x)] = f"c{len(coefficients)}"
            coefficients.append(x)
        else:
            args = tuple(place(y) for y in x.args)
            names[id(x)] = f"t{len(body)}"
            body.append(Instruction(f"t{len(body)}", x.op, args))
        return names[id(x)]

    # The buffers first: their instructions are what the parameter's are made of.
    order = [key for key in outputs if key not in ("param", "part")]
    placed = {key: place(outputs[key]) for key in (*order, "param", "part")}
    return Program(
        name, tuple(order), tuple(body), placed["param"], tuple(placed[key] for key in order), placed["part"], tuple(coefficients)
    )


def programs(job: Job) -> list[tuple[Program, list[int]]]:
    """The programs of a job and the configs that each serves: configs whose zeros are alike share one."""
    groups: dict[frozenset[str], list[int]] = {}
    for config, rule in enumerate(job.rules):
        zeros = set()
        for name, value in vars(rule.values).items():
            if isinstance(value, tuple):
                zeros |= {f"{name}[{i}]" for i, x in enumerate(value) if x == 0}
            elif value == 0:
                zeros.add(name)
        groups.setdefault(frozenset(zeros), []).append(config)
    return [(trace(job.rule, zeros), configs) for zeros, configs in groups.items()]
