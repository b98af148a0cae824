"""A traced program as in-place calls on fixed arrays, planned for some steps with the values of its coefficients.

Between products, roots and signs everything is a linear form of arrays. A form is written only where an operation, a buffer
or a measurement needs it, and scalars never take a pass of their own: every array carries a scale by step, kept on the host.
So the decay of a buffer or of the weights, x' = k x + ..., is a scale that shrinks while the array itself only adds up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwsim.walk.program import Program

# Rows of the sizes of one step: <w, w> before it, <g, g>, <d, d> and <w, d> of the move d, <p, p> of the gradient's share p.
NORM, GRAD, MOVE, CROSS, PART = range(5)
# Scales begin anew after so many steps.
PERIOD = 128
# Decays that are kept as scales: after a period 0.89 has left 3e-7, far from the ends of float32.
_SLOW = (0.89, 1.0)
# Largest factor between the terms of a sum whose first is taken with factor 1.
_SPREAD = 1e6
# w' - w is measured as (k - 1) w + d from three scalar products unless the decay 1 - k is larger than this.
_MILD = 0.1


class Array(NamedTuple):
    """One memory in both libraries: numpy has the cheaper calls, torch the fused and the broadcasting ones."""

    tensor: Tensor
    numpy: np.ndarray

    @classmethod
    def of(cls, tensor: Tensor) -> "Array":
        return cls(tensor, tensor.numpy())


# A float, or an array of shape (steps, 1), or (steps, configs) where the configs walked together differ.
Coefficient = Any
Call = Callable[[int], object]
# Of each step: a number, or a column, then shape (steps, rows, 1).
Values = list[float] | Tensor


class Uneven(Exception):
    """Configs would be walked in different ways; apart they can be."""


class Pool:
    """Scratch arrays of one shape."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.made: list[Array] = []
        self.free: list[Array] = []

    def clear(self) -> None:
        """Take back what was taken, and nothing that was only given."""
        self.free = list(self.made)

    def take(self) -> Array:
        if not self.free:
            self.made.append(Array.of(torch.empty(self.shape, dtype=self.dtype)))
            return self.made[-1]
        return self.free.pop()

    def give(self, array: Array) -> None:
        self.free.append(array)


class _Atom:
    """An array of the step. Its true value is `scale` times what lies at `place`.

    Attributes:
        op: leaf, old (a buffer before its update), new (after), sum, dots, or the operation.
        args: What an operation or a measurement reads.
        terms: What a sum or a new buffer is made of; the key None stands for ones.
        old: What a new buffer replaces.
        owned: `place` is scratch, free once nobody reads the atom any more.
        readers: How many have yet to read it.
    """

    def __init__(self, op: str, args: tuple["_Atom", ...] = (), place: Array | None = None, scale: Coefficient = 1.0) -> None:
        self.op, self.args, self.place, self.scale = op, args, place, scale
        self.terms: _Form = {}
        self.old: _Atom | None = None
        self.done, self.owned = op in ("leaf", "old"), False
        self.readers = 0

    @property
    def array(self) -> Array:
        assert self.place is not None
        return self.place


_Form = dict[_Atom | None, Coefficient]


def _times(factor: Coefficient, form: _Form) -> _Form:
    return {atom: factor * c for atom, c in form.items()}


def _plus(a: _Form, b: _Form) -> _Form:
    total = dict(a)
    for atom, c in b.items():
        total[atom] = total[atom] + c if atom in total else c
    return total


class Plan:
    """Some steps of a program as calls.

    Args:
        program: What to do.
        coefficients: Their values: see `Program.evaluate`.
        steps: Number of steps planned.
        param: The weights, overwritten.
        grad: Where the gradient of a step lies; scratch after its last use.
        buffers: The program's buffers, overwritten.
        pool: Scratch of the same shape, free again between steps.
        sizes: Shape (steps + 1, 5, rows); `NORM` and `GRAD` are left to the caller.

    Attributes:
        calls: To be called in order with the number of the step, 0 at the first.
        before: The weights are `before[t]` times `param` when step t begins, (steps, 1) or (steps, configs).

    Raises:
        Uneven: Several configs that cannot be walked together.
    """

    def __init__(
        self, program: Program, coefficients: Sequence[Coefficient], steps: int, param: Array, grad: Array, buffers: Sequence[Array],
        pool: Pool, sizes: Tensor,
    ) -> None:  # fmt: skip
        pool.clear()
        self.steps, self.pool, self.sizes = steps, pool, sizes
        self.rows = len(param.numpy)
        self.calls: list[Call] = []
        self.open: set[_Atom] = set()
        self.memo: dict[tuple[Any, ...], _Atom] = {}
        self.fused: set[_Atom] = set()
        self.grad, self.old = _Atom("leaf", place=grad), _Atom("old", place=param)
        self.grad.owned = True
        news = [self._new(_Atom("old", place=buffer)) for buffer in buffers]
        self.param = self._new(self.old)
        forms = self._forms(program, coefficients, news)
        self.updated = (*news, self.param)
        self._choose_move()
        self._choose_part(forms(program.part))
        for new in self.updated:
            self._choose_scale(new)
        roots = [*self.measured, *self.updated]
        self.atoms = self._reachable(roots)
        self.fused = self._find_fused()
        self.atoms = [atom for atom in self.atoms if atom not in self.fused]
        for atom in self.atoms:
            for read in self._reads(atom):
                read.readers += 1
        for root in roots:
            self._place(root)
        # The gradient's array has become scratch of this plan's own.
        pool.clear()

    # What is computed

    @staticmethod
    def _new(old: _Atom) -> _Atom:
        new = _Atom("new", place=old.place)
        new.old = old
        return new

    def _forms(self, program: Program, coefficients: Sequence[Coefficient], news: list[_Atom]) -> Callable[[str | float], _Form]:
        """Build every atom; returns the form of a name."""
        scalars = {f"c{i}": value for i, value in enumerate(coefficients)}
        known: dict[str, _Form] = {"grad": {self.grad: 1.0}, "param": {self.old: 1.0}}
        known |= {name: {new.old: 1.0} for name, new in zip(program.buffers, news, strict=True)}

        def form(name: str | float) -> _Form:
            if isinstance(name, str):
                return known[name] if name in known else {None: scalars[name]}
            return {None: name} if name else {}

        outputs = [(name, new) for name, new in zip((*program.new, program.param), (*news, self.param), strict=True)]
        targets: dict[str | float, _Atom] = {}
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

    def _apply(self, op: str, args: list[_Form]) -> _Form:
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

    def _operation(self, op: str, *args: _Atom) -> _Atom:
        return self.memo.setdefault((op, *args), _Atom(op, args))

    @staticmethod
    def _sum(form: _Form) -> _Atom:
        atom = _Atom("sum")
        atom.terms = form
        return atom

    def _single(self, form: _Form, positive: bool = False) -> tuple[Coefficient, _Atom]:
        """A form as c times an atom."""
        if len(form) == 1:
            ((atom, c),) = form.items()
            if atom is not None and not (positive and self._alike((self._spread(c) <= 0).any(0))):
                return c, atom
        return 1.0, self._sum(form)

    def _choose_move(self) -> None:
        """Write w' as k w + d; or as w + d where k is far from 1."""
        keep = self.param.terms.pop(self.old, 0.0)
        if self._alike((np.abs(self._spread(keep) - 1) > _MILD).any(0)):
            self.param.terms, keep = _plus({self.old: keep - 1.0}, self.param.terms), 1.0
        self.keep = self._spread(keep)
        self.measured: list[_Atom] = []
        self.move: tuple[Coefficient, _Atom] | None = None
        self.move_terms = self.param.terms
        if self.move_terms:
            self.move = c, atom = self._single(self.move_terms)
            self.param.terms = {atom: c}
            self.measured.append(_Atom("dots", (atom, self.old)))
        self.param.terms = _plus({self.old: keep}, self.param.terms)

    def _choose_part(self, form: _Form) -> None:
        """Where the share is the move up to a factor, one scalar product serves both."""
        self.part: tuple[Coefficient, _Atom] | None = None
        self.shared = False
        if not form:
            return
        if self.move is not None and set(form) == set(self.move_terms):
            with np.errstate(all="ignore"):
                ratios = [self._spread(form[atom] / self.move_terms[atom]) for atom in form]
                same = [np.isclose(ratio, ratios[0], rtol=1e-12, atol=0.0).all(0) for ratio in ratios]
            if all(self._alike(each) for each in same):
                self.part, self.shared = (ratios[0] * self.move[0], self.move[1]), True
                return
        self.part = self._single(form)
        self.measured.append(_Atom("dots", (self.part[1],)))

    def _choose_scale(self, new: _Atom) -> None:
        assert new.old is not None
        keep = self._spread(new.terms.get(new.old, 0.0))
        if self._alike(((keep >= _SLOW[0]) & (keep <= _SLOW[1])).all(0)):
            new.scale = np.concatenate([np.cumprod(keep[at : at + PERIOD], axis=0) for at in range(0, self.steps, PERIOD)])
            new.old.scale = np.concatenate([np.ones_like(new.scale[:1]), new.scale[:-1]])
            new.old.scale[::PERIOD] = 1.0
        else:
            new.scale = new.old.scale = np.ones((self.steps, 1))

    # Who reads what

    def _reads(self, atom: _Atom) -> Iterator[_Atom]:
        for read in (*atom.args, *atom.terms):
            if read is None or (atom.op == "new" and read is atom.old):
                continue
            if read in self.fused and atom.terms:
                yield from read.args
            else:
                yield read

    def _reachable(self, roots: Sequence[_Atom]) -> list[_Atom]:
        found: dict[_Atom, None] = {}
        waiting = list(roots)
        while waiting:
            atom = waiting.pop()
            if atom not in found:
                found[atom] = None
                waiting += self._reads(atom)
        return list(found)

    def _find_fused(self) -> set[_Atom]:
        """Products that only one sum reads, and that it can add to something else as it multiplies them."""
        readers: dict[_Atom, list[_Atom]] = {}
        for atom in self.atoms:
            for read in self._reads(atom):
                readers.setdefault(read, []).append(atom)
        fused = set()
        for product, by in readers.items():
            if product.op == "mul" and len(by) == 1 and by[0].op in ("sum", "new"):
                others = [term for term in by[0].terms if term is not None and term.op != "mul"]
                if others:
                    fused.add(product)
        return fused - set(self.updated)

    def _depends(self, atom: _Atom, on: _Atom) -> bool:
        return atom is on or any(not read.done and self._depends(read, on) for read in self._reads(atom))

    # In which order, and where

    def _place(self, atom: _Atom) -> None:
        if atom.done:
            return
        self.open.add(atom)
        for read in self._reads(atom):
            self._place(read)
        if atom.op == "new":
            self._clear(atom)
        reads = list(self._reads(atom))
        for read in reads:
            read.readers -= 1
        dying = [read for read in dict.fromkeys(reads) if read.owned and not read.readers]
        if atom.op == "dots":
            self._emit_dots(atom)
        elif atom.op == "new":
            self._emit_new(atom)
        else:
            taken = self._emit_sum(atom, dying) if atom.op == "sum" else self._emit_operation(atom, dying)
            dying = [read for read in dying if read.place is not taken]
        for read in dying:
            self.pool.give(read.array)
            read.owned = False
        self.open.discard(atom)
        atom.done = True

    def _clear(self, new: _Atom) -> None:
        """See to it that nobody reads the old value any more, or give those who will a copy."""
        old = new.old
        assert old is not None
        copy = False
        for reader in self.atoms:
            if reader.done or reader is new or all(read is not old for read in self._reads(reader)):
                continue
            if reader in self.open or self._depends(reader, new):
                copy = True
            else:
                self._place(reader)
        if copy:
            place, source = self.pool.take(), old.array.numpy
            self.calls.append(_copy(source, place.numpy))
            old.place, old.owned = place, True

    # How

    def _values(self, c: Coefficient) -> Values:
        values = self._spread(c)
        if (values == values[:, :1]).all():
            return values[:, 0].tolist()
        return self._by_row(values)[:, :, None]

    def _by_row(self, values: np.ndarray) -> Tensor:
        """(steps, configs) to (steps, rows) in the walk's precision."""
        return torch.from_numpy(values).to(self.sizes.dtype).repeat_interleave(self.rows // values.shape[1], 1)

    @staticmethod
    def _alike(each: Any) -> bool:
        """What holds of every config."""
        if each.any() != each.all():
            raise Uneven
        return bool(each.all())

    def _emit_dots(self, atom: _Atom) -> None:
        first = atom.args[0].array.numpy
        measures = [(first, PART)] if len(atom.args) == 1 else [(first, MOVE)]
        if len(atom.args) == 2 and (self.keep != 1).any():
            measures.append((atom.args[1].array.numpy, CROSS))
        for second, row in measures:
            self._dot(first, second, row)

    def _dot(self, first: np.ndarray, second: np.ndarray, row: int) -> None:
        self.calls.append(_vecdot(first, second, list(self.sizes[:, row].numpy())))

    def _multiply(self, source: Array, factor: Coefficient, out: Array) -> None:
        self.calls.append(_scalar(np.multiply, source.numpy, self._values(factor), out.numpy))

    def _add(self, terms: _Form, unit: Coefficient, base: Array, out: Array) -> None:
        """out = base + terms / unit."""
        for atom, c in terms.items():
            if atom is None:
                self.calls.append(_scalar(np.add, base.numpy, self._values(c / unit), out.numpy))
            elif atom in self.fused:
                x, y = (arg.array.tensor for arg in atom.args)
                values = self._values(c * atom.args[0].scale * atom.args[1].scale / unit)
                self.calls.append(_addcmul(base.tensor, x, y, values, out.tensor))
            else:
                self.calls.append(_add(base.tensor, atom.array.tensor, self._values(c * atom.scale / unit), out.tensor))
            base = out

    def _emit_new(self, atom: _Atom) -> None:
        array, others = atom.array, dict(atom.terms)
        keep = others.pop(atom.old, None)
        if keep is None:
            self._write(array, others)
        else:
            if (atom.scale == 1).all() and np.any(np.asarray(keep) != 1):
                self._multiply(array, keep, array)
            self._add(others, atom.scale, array, array)

    def _write(self, out: Array, terms: _Form) -> None:
        """out = terms."""
        plain = [atom for atom in terms if atom is not None and atom not in self.fused]
        if plain:
            # Whoever lies there already comes first.
            lead = next((atom for atom in plain if atom.place is out), plain[0])
            self._multiply(lead.array, terms[lead] * lead.scale, out)
        else:
            lead = None
            self.calls.append(_fill(self._values(terms.get(None, 0.0)), out.numpy))
        self._add({atom: c for atom, c in terms.items() if atom is not lead}, 1.0, out, out)

    def _emit_sum(self, atom: _Atom, dying: list[_Atom]) -> Array:
        terms = atom.terms
        lead = self._leading(terms)
        if lead is None:
            atom.place, atom.owned = self.pool.take(), True
            self._write(atom.array, terms)
            return atom.array
        atom.scale = terms[lead] * lead.scale
        atom.place, atom.owned = (lead.array if lead in dying else self.pool.take()), True
        self._add({a: c for a, c in terms.items() if a is not lead}, atom.scale, lead.array, atom.array)
        return atom.array

    def _leading(self, terms: _Form) -> _Atom | None:
        """A term that may stand in a sum with factor 1, the sum then being scaled: positive, and no factor of the others large."""
        if len(terms) < 2:
            return None
        sizes = {}
        for atom, c in terms.items():
            unscaled = 1.0 if atom is None else atom.args[0].scale * atom.args[1].scale if atom in self.fused else atom.scale
            sizes[atom] = self._spread(c * unscaled)
        largest = np.max(np.broadcast_arrays(*(np.abs(size) for size in sizes.values())), axis=0)
        plain = [atom for atom in terms if atom is not None and atom not in self.fused]
        fit = [atom for atom in plain if self._alike(((sizes[atom] > 0) & (sizes[atom] * _SPREAD >= largest)).all(0))]
        return next((atom for atom in fit if atom.owned), fit[0] if fit else None)

    def _emit_operation(self, atom: _Atom, dying: list[_Atom]) -> Array:
        atom.place, atom.owned = (dying[0].array if dying else self.pool.take()), True
        out, first = atom.array, atom.args[0]
        if atom.op in ("mul", "div"):
            second = atom.args[1]
            atom.scale = first.scale * second.scale if atom.op == "mul" else first.scale / second.scale
            function = np.multiply if atom.op == "mul" else np.divide
            self.calls.append(_numpy(function, first.array.numpy, second.array.numpy, out.numpy))
        elif atom.op in ("sqrt", "reciprocal"):
            atom.scale = first.scale**0.5 if atom.op == "sqrt" else 1 / first.scale
            self.calls.append(_numpy(np.sqrt if atom.op == "sqrt" else np.reciprocal, first.array.numpy, out.numpy))
        else:
            atom.scale = np.sign(first.scale) if atom.op == "sign" else first.scale**-0.5
            self.calls.append(_torch(torch.sign if atom.op == "sign" else torch.rsqrt, first.array.tensor, out.tensor))
        return out

    # What the caller reads

    @property
    def before(self) -> np.ndarray:
        return self._spread(self.old.scale)

    def restore(self, step: int) -> None:
        """Make weights and buffers what they are after that step, the last of a `PERIOD`."""
        for new in self.updated:
            if (new.scale[step] != 1).any():
                new.array.tensor.mul_(self._by_row(new.scale[step : step + 1]).T)

    def squares(self, first: int, norm: np.ndarray, distance: np.ndarray, part: np.ndarray) -> None:
        """What the sizes say of some steps from `first` on.

        Args:
            norm: Filled with ||w||^2 before each step and after the last, (steps + 1, rows).
            distance: Filled with ||w' - w||^2, (steps, rows).
            part: Filled with ||Delta_g w||^2, (steps, rows).
        """
        steps = len(distance)
        sizes = self.sizes.numpy()[first : first + steps + 1]
        norms, *others = self.factors
        part_sq, move_sq, shrink_sq, crossed = (None if other is None else other[first : first + steps] for other in others)
        np.multiply(sizes[:, NORM], norms[first : first + steps + 1], out=norm)
        if part_sq is None:
            part[:] = 0.0
        else:
            np.multiply(sizes[:steps, MOVE if self.shared else PART], part_sq, out=part)
        if move_sq is None:
            distance[:] = 0.0
        else:
            np.multiply(sizes[:steps, MOVE], move_sq, out=distance)
        if shrink_sq is not None:
            distance += shrink_sq * norm[:steps]
        if crossed is not None:
            distance -= crossed * sizes[:steps, CROSS]

    @cached_property
    def factors(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Of the sizes: of <w, w>, <p, p>, <d, d>; (1 - k)^2; of <w, d>. Each (steps, 1) or (steps, rows); None for 0."""
        # After a period's last step the arrays have been restored.
        final = np.ones_like(self.before[:1]) if self.steps % PERIOD == 0 else self._spread(self.param.scale)[-1:]
        shrink = 1 - self.keep
        shrinks = bool(shrink.any())
        moved = None if self.move is None else self.move[0] * self.move[1].scale
        return (
            self._column(np.concatenate([self.before, final]) ** 2),
            None if self.part is None else self._column((self.part[0] * self.part[1].scale) ** 2),
            None if moved is None else self._column(moved**2),
            self._column(shrink**2) if shrinks else None,
            self._column(2 * shrink * self.before * moved) if shrinks and moved is not None else None,
        )

    def _column(self, scale: Coefficient) -> np.ndarray:
        values = self._spread(scale)
        return self._by_row(values).numpy() if values.shape[1] > 1 else values.astype(self.sizes.numpy().dtype)

    def _spread(self, c: Coefficient) -> np.ndarray:
        """As an array."""
        return c if isinstance(c, np.ndarray) and c.ndim else np.full((self.steps, 1), c, dtype=np.float64)


# The calls. Arguments by position and names bound beforehand: these run some ten thousand times a second.


def _numpy(function: Callable[..., object], *arrays: np.ndarray) -> Call:
    if len(arrays) == 2:
        a, out = arrays
        return lambda t: function(a, out)
    first, second, to = arrays
    return lambda t: function(first, second, to)


def _scalar(function: Callable[..., object], a: np.ndarray, values: Values, out: np.ndarray) -> Call:
    numbers = list(values.numpy()) if isinstance(values, Tensor) else values
    return lambda t: function(a, numbers[t], out)


def _torch(function: Callable[..., object], x: Tensor, out: Tensor) -> Call:
    return lambda t: function(x, out=out)


def _copy(source: np.ndarray, to: np.ndarray) -> Call:
    return lambda t: np.copyto(to, source)


def _fill(values: Values, out: np.ndarray) -> Call:
    numbers = list(values.numpy()) if isinstance(values, Tensor) else values
    return lambda t: np.copyto(out, numbers[t])


def _vecdot(a: np.ndarray, b: np.ndarray, rows: list[np.ndarray]) -> Call:
    vecdot = np.vecdot
    return lambda t: vecdot(a, b, rows[t])


def _add(base: Tensor, y: Tensor, values: Values, out: Tensor) -> Call:
    """Both forms round alike, so a config's walk does not depend on its company."""
    if isinstance(values, Tensor):
        columns = values.unbind(0)
        if base is out:
            return lambda t: out.addcmul_(y, columns[t])
        return lambda t: torch.addcmul(base, y, columns[t], out=out)
    if base is out:
        return lambda t: out.add_(y, alpha=values[t])
    return lambda t: torch.add(base, y, alpha=values[t], out=out)


def _addcmul(base: Tensor, x: Tensor, y: Tensor, values: Values, out: Tensor) -> Call:
    if isinstance(values, Tensor):
        raise Uneven
    if base is out:
        return lambda t: out.addcmul_(x, y, value=values[t])
    return lambda t: torch.addcmul(base, x, y, value=values[t], out=out)
