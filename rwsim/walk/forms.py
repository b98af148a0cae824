"""Some steps of a traced program as linear forms of arrays, with the values of its coefficients.

Between products, roots and signs everything is a linear form of arrays. A form is written only where an operation, a buffer
or a measurement needs it, and scalars never take a pass of their own: every array carries a scale by step, kept on the host.
So the decay of a buffer or of the weights, x' = k x + ..., is a scale that shrinks while the array itself only adds up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rwsim.walk.calls import Array, Uneven
from rwsim.walk.program import Program

# Scales begin anew after so many steps.
PERIOD = 128
# Decays that are kept as scales: after a period 0.89 has left 3e-7, far from the ends of float32.
_SLOW = (0.89, 1.0)
# w' - w is measured as (k - 1) w + d from three scalar products unless the decay 1 - k is larger than this.
_MILD = 0.1
# A float, or an array of shape (steps, 1), or (steps, configs) where the configs walked together differ.
Coefficient = Any


class Atom:
    """An array of the step. Its true value is `scale` times what lies at `place`.

    Attributes:
        op: leaf, old (a buffer before its update), new (after), sum, dots, or the operation.
        args: What an operation or a measurement reads.
        terms: What a sum or a new buffer is made of; the key None stands for ones.
        old: What a new buffer replaces.
        owned: `place` is scratch, free once nobody reads the atom any more.
        readers: How many have yet to read it.
    """

    def __init__(self, op: str, args: tuple["Atom", ...] = (), place: Array | None = None, scale: Coefficient = 1.0) -> None:
        self.op, self.args, self.place, self.scale = op, args, place, scale
        self.terms: Form = {}
        self.old: Atom | None = None
        self.done, self.owned = op in ("leaf", "old"), False
        self.readers = 0

    @property
    def array(self) -> Array:
        assert self.place is not None
        return self.place


Form = dict[Atom | None, Coefficient]


def _times(factor: Coefficient, form: Form) -> Form:
    return {atom: factor * c for atom, c in form.items()}


def _plus(a: Form, b: Form) -> Form:
    total = dict(a)
    for atom, c in b.items():
        total[atom] = total[atom] + c if atom in total else c
    return total


def alike(each: Any) -> bool:
    """What holds of every config."""
    if each.any() != each.all():
        raise Uneven
    return bool(each.all())


class Forms:
    """What some steps of a program compute.

    Args:
        program: What to do.
        coefficients: Their values: see `Program.evaluate`.
        steps: Number of steps.
        param: The weights.
        grad: Where the gradient of a step lies.
        buffers: The program's buffers.

    Attributes:
        old: The weights before the update.
        param: The weights after it.
        updated: The new buffers, then the new weights.
        keep: k of w' = k w + d, (steps, 1) or (steps, configs).
        move: d as a factor and an atom; None for 0.
        part: The gradient's share of the update, likewise.
        shared: One scalar product serves both.
        measured: The scalar products to take.
        fused: Products that the sum reading them forms by itself.
        atoms: All others that are needed, each with the number of its readers.

    Raises:
        Uneven: Several configs that cannot be walked together.
    """

    def __init__(
        self, program: Program, coefficients: Sequence[Coefficient], steps: int, param: Array, grad: Array, buffers: Sequence[Array],
    ) -> None:  # fmt: skip
        self.steps = steps
        self.memo: dict[tuple[Any, ...], Atom] = {}
        self.fused: set[Atom] = set()
        self.grad, self.old = Atom("leaf", place=grad), Atom("old", place=param)
        self.grad.owned = True
        news = [self._new(Atom("old", place=buffer)) for buffer in buffers]
        self.param = self._new(self.old)
        forms = self._forms(program, coefficients, news)
        self.updated = (*news, self.param)
        self._choose_move()
        self._choose_part(forms(program.part))
        for new in self.updated:
            self._choose_scale(new)
        self.atoms = self._reachable([*self.measured, *self.updated])
        self.fused = self._find_fused()
        self.atoms = [atom for atom in self.atoms if atom not in self.fused]
        for atom in self.atoms:
            for read in self.reads(atom):
                read.readers += 1

    # What is computed

    @staticmethod
    def _new(old: Atom) -> Atom:
        new = Atom("new", place=old.place)
        new.old = old
        return new

    def _forms(self, program: Program, coefficients: Sequence[Coefficient], news: list[Atom]) -> Callable[[str | float], Form]:
        """Build every atom; returns the form of a name."""
        scalars = {f"c{i}": value for i, value in enumerate(coefficients)}
        known: dict[str, Form] = {"grad": {self.grad: 1.0}, "param": {self.old: 1.0}}
        known |= {name: {new.old: 1.0} for name, new in zip(program.buffers, news, strict=True)}

        def form(name: str | float) -> Form:
            if isinstance(name, str):
                return known[name] if name in known else {None: scalars[name]}
            return {None: name} if name else {}

        outputs = [(name, new) for name, new in zip((*program.new, program.param), (*news, self.param), strict=True)]
        targets: dict[str | float, Atom] = {}
        for name, new in outputs:
            targets.setdefault(name, new)
        uses = Counter(arg for line in program.body for arg in line.args)
        for line in program.body:
            value = self._apply(line.op, [form(arg) for arg in line.args])
            if line.target in targets:
                targets[line.target].terms = value
                value = {targets[line.target]: 1.0}
            elif len(value) > 1 and uses[line.target] > 1:
                value = {self._sum(value): 1.0}
            known[line.target] = value
        computed = {line.target for line in program.body}
        for name, new in outputs:
            if targets[name] is not new or name not in computed:
                new.terms = form(name)
        return form

    def _apply(self, op: str, args: list[Form]) -> Form:
        if op in ("add", "sub"):
            return _plus(args[0], args[1] if op == "add" else _times(-1.0, args[1]))
        scalars = [set(arg) <= {None} for arg in args]
        if op == "mul" and any(scalars):
            scalar, form = args if scalars[0] else reversed(args)
            return _times(scalar.get(None, 0.0), form)
        if op == "div" and scalars[0]:
            c, atom = self._single(args[1])
            return {self._operation("reciprocal", atom): args[0].get(None, 0.0) / c}
        (c, atom), *more = (self._single(arg, positive=op in ("sqrt", "rsqrt")) for arg in args)
        if more:
            other, second = more[0]
            return {self._operation(op, atom, second): c * other if op == "mul" else c / other}
        return {self._operation(op, atom): np.sign(c) if op == "sign" else c ** (0.5 if op == "sqrt" else -0.5)}

    def _operation(self, op: str, *args: Atom) -> Atom:
        return self.memo.setdefault((op, *args), Atom(op, args))

    @staticmethod
    def _sum(form: Form) -> Atom:
        atom = Atom("sum")
        atom.terms = form
        return atom

    def _single(self, form: Form, positive: bool = False) -> tuple[Coefficient, Atom]:
        """A form as c times an atom."""
        if len(form) == 1:
            ((atom, c),) = form.items()
            if atom is not None and not (positive and alike((self.spread(c) <= 0).any(0))):
                return c, atom
        return 1.0, self._sum(form)

    def _choose_move(self) -> None:
        """Write w' as k w + d; or as w + d where k is far from 1."""
        keep = self.param.terms.pop(self.old, 0.0)
        if alike((np.abs(self.spread(keep) - 1) > _MILD).any(0)):
            self.param.terms, keep = _plus({self.old: keep - 1.0}, self.param.terms), 1.0
        self.keep = self.spread(keep)
        self.measured: list[Atom] = []
        self.move: tuple[Coefficient, Atom] | None = None
        self.move_terms = self.param.terms
        if self.move_terms:
            self.move = c, atom = self._single(self.move_terms)
            self.param.terms = {atom: c}
            self.measured.append(Atom("dots", (atom, self.old)))
        self.param.terms = _plus({self.old: keep}, self.param.terms)

    def _choose_part(self, form: Form) -> None:
        """Where the share is the move up to a factor, one scalar product serves both."""
        self.part: tuple[Coefficient, Atom] | None = None
        self.shared = False
        if not form:
            return
        if self.move is not None and set(form) == set(self.move_terms):
            with np.errstate(all="ignore"):
                ratios = [self.spread(form[atom] / self.move_terms[atom]) for atom in form]
                same = [np.isclose(ratio, ratios[0], rtol=1e-12, atol=0.0).all(0) for ratio in ratios]
            if all(alike(each) for each in same):
                self.part, self.shared = (ratios[0] * self.move[0], self.move[1]), True
                return
        self.part = self._single(form)
        self.measured.append(Atom("dots", (self.part[1],)))

    def _choose_scale(self, new: Atom) -> None:
        assert new.old is not None
        keep = self.spread(new.terms.get(new.old, 0.0))
        if alike(((keep >= _SLOW[0]) & (keep <= _SLOW[1])).all(0)):
            new.scale = np.concatenate([np.cumprod(keep[at : at + PERIOD], axis=0) for at in range(0, self.steps, PERIOD)])
            new.old.scale = np.concatenate([np.ones_like(new.scale[:1]), new.scale[:-1]])
            new.old.scale[::PERIOD] = 1.0
        else:
            new.scale = new.old.scale = np.ones((self.steps, 1))

    # Who reads what

    def reads(self, atom: Atom) -> Iterator[Atom]:
        for read in (*atom.args, *atom.terms):
            if read is None or (atom.op == "new" and read is atom.old):
                continue
            if read in self.fused and atom.terms:
                yield from read.args
            else:
                yield read

    def _reachable(self, roots: Sequence[Atom]) -> list[Atom]:
        found: dict[Atom, None] = {}
        waiting = list(roots)
        while waiting:
            atom = waiting.pop()
            if atom not in found:
                found[atom] = None
                waiting += self.reads(atom)
        return list(found)

    def _find_fused(self) -> set[Atom]:
        """Products that only one sum reads, and that it can add to something else as it multiplies them."""
        readers: dict[Atom, list[Atom]] = {}
        for atom in self.atoms:
            for read in self.reads(atom):
                readers.setdefault(read, []).append(atom)
        fused = set()
        for product, by in readers.items():
            if product.op == "mul" and len(by) == 1 and by[0].op in ("sum", "new"):
                others = [term for term in by[0].terms if term is not None and term.op != "mul"]
                if others:
                    fused.add(product)
        return fused - set(self.updated)

    def spread(self, c: Coefficient) -> np.ndarray:
        """As an array."""
        return c if isinstance(c, np.ndarray) and c.ndim else np.full((self.steps, 1), c, dtype=np.float64)
