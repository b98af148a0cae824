"""Linear forms as in-place calls on fixed arrays, planned for some steps.

Products, roots, signs and the forms they need are put in an order in which an array is overwritten only when nobody reads it
any more, and each is given a place. The calls leave the sizes of a step as scalar products of arrays; what those say of the
weights and their moves is worked out here as well, from the scales of the arrays.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rwsim.walk import calls
from rwsim.walk.calls import Array, Call, Pool, Values
from rwsim.walk.forms import PERIOD, Atom, Coefficient, Form, Forms, alike
from rwsim.walk.program import Program

# Rows of the sizes of one step: <w, w> before it, <g, g>, <d, d> and <w, d> of the move d, <p, p> of the gradient's share p.
NORM, GRAD, MOVE, CROSS, PART = range(5)
# Largest factor between the terms of a sum whose first is taken with factor 1.
_SPREAD = 1e6


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
        self.forms = Forms(program, coefficients, steps, param, grad, buffers)
        self.pool, self.sizes = pool, sizes
        self.rows = len(param.numpy)
        self.calls: list[Call] = []
        self.open: set[Atom] = set()
        for root in (*self.forms.measured, *self.forms.updated):
            self._place(root)
        # The gradient's array has become scratch of this plan's own.
        pool.clear()

    # In which order, and where

    def _place(self, atom: Atom) -> None:
        if atom.done:
            return
        self.open.add(atom)
        for read in self.forms.reads(atom):
            self._place(read)
        if atom.op == "new":
            self._clear(atom)
        reads = list(self.forms.reads(atom))
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

    def _clear(self, new: Atom) -> None:
        """See to it that nobody reads the old value any more, or give those who will a copy."""
        old = new.old
        assert old is not None
        copy = False
        for reader in self.forms.atoms:
            if reader.done or reader is new or all(read is not old for read in self.forms.reads(reader)):
                continue
            if reader in self.open or self._depends(reader, new):
                copy = True
            else:
                self._place(reader)
        if copy:
            place, source = self.pool.take(), old.array.numpy
            self.calls.append(calls.copy(source, place.numpy))
            old.place, old.owned = place, True

    def _depends(self, atom: Atom, on: Atom) -> bool:
        return atom is on or any(not read.done and self._depends(read, on) for read in self.forms.reads(atom))

    # How

    def _values(self, c: Coefficient) -> Values:
        values = self.forms.spread(c)
        if (values == values[:, :1]).all():
            return values[:, 0].tolist()
        return self._by_row(values)[:, :, None]

    def _by_row(self, values: np.ndarray) -> Tensor:
        """(steps, configs) to (steps, rows) in the walk's precision."""
        return torch.from_numpy(values).to(self.sizes.dtype).repeat_interleave(self.rows // values.shape[1], 1)

    def _emit_dots(self, atom: Atom) -> None:
        first = atom.args[0].array.numpy
        measures = [(first, PART)] if len(atom.args) == 1 else [(first, MOVE)]
        if len(atom.args) == 2 and (self.forms.keep != 1).any():
            measures.append((atom.args[1].array.numpy, CROSS))
        for second, row in measures:
            self._dot(first, second, row)

    def _dot(self, first: np.ndarray, second: np.ndarray, row: int) -> None:
        self.calls.append(calls.vecdot(first, second, list(self.sizes[:, row].numpy())))

    def _multiply(self, source: Array, factor: Coefficient, out: Array) -> None:
        self.calls.append(calls.scalar(np.multiply, source.numpy, self._values(factor), out.numpy))

    def _add(self, terms: Form, unit: Coefficient, base: Array, out: Array) -> None:
        """out = base + terms / unit."""
        for atom, c in terms.items():
            if atom is None:
                self.calls.append(calls.scalar(np.add, base.numpy, self._values(c / unit), out.numpy))
            elif atom in self.forms.fused:
                x, y = (arg.array.tensor for arg in atom.args)
                values = self._values(c * atom.args[0].scale * atom.args[1].scale / unit)
                self.calls.append(calls.addcmul(base.tensor, x, y, values, out.tensor))
            else:
                self.calls.append(calls.add(base.tensor, atom.array.tensor, self._values(c * atom.scale / unit), out.tensor))
            base = out

    def _emit_new(self, atom: Atom) -> None:
        array, others = atom.array, dict(atom.terms)
        keep = others.pop(atom.old, None)
        if keep is None:
            self._write(array, others)
        else:
            if (atom.scale == 1).all() and np.any(np.asarray(keep) != 1):
                self._multiply(array, keep, array)
            self._add(others, atom.scale, array, array)

    def _write(self, out: Array, terms: Form) -> None:
        """out = terms."""
        plain = [atom for atom in terms if atom is not None and atom not in self.forms.fused]
        if plain:
            # Whoever lies there already comes first.
            lead = next((atom for atom in plain if atom.place is out), plain[0])
            self._multiply(lead.array, terms[lead] * lead.scale, out)
        else:
            lead = None
            self.calls.append(calls.fill(self._values(terms.get(None, 0.0)), out.numpy))
        self._add({atom: c for atom, c in terms.items() if atom is not lead}, 1.0, out, out)

    def _emit_sum(self, atom: Atom, dying: list[Atom]) -> Array:
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

    def _leading(self, terms: Form) -> Atom | None:
        """A term that may stand in a sum with factor 1, the sum then being scaled: positive, and no factor of the others large."""
        if len(terms) < 2:
            return None
        sizes = {}
        for atom, c in terms.items():
            unscaled = 1.0 if atom is None else atom.args[0].scale * atom.args[1].scale if atom in self.forms.fused else atom.scale
            sizes[atom] = self.forms.spread(c * unscaled)
        largest = np.max(np.broadcast_arrays(*(np.abs(size) for size in sizes.values())), axis=0)
        plain = [atom for atom in terms if atom is not None and atom not in self.forms.fused]
        fit = [atom for atom in plain if alike(((sizes[atom] > 0) & (sizes[atom] * _SPREAD >= largest)).all(0))]
        return next((atom for atom in fit if atom.owned), fit[0] if fit else None)

    def _emit_operation(self, atom: Atom, dying: list[Atom]) -> Array:
        atom.place, atom.owned = (dying[0].array if dying else self.pool.take()), True
        out, first = atom.array, atom.args[0]
        if atom.op in ("mul", "div"):
            second = atom.args[1]
            atom.scale = first.scale * second.scale if atom.op == "mul" else first.scale / second.scale
            function = np.multiply if atom.op == "mul" else np.divide
            self.calls.append(calls.of_numpy(function, first.array.numpy, second.array.numpy, out.numpy))
        elif atom.op in ("sqrt", "reciprocal"):
            atom.scale = first.scale**0.5 if atom.op == "sqrt" else 1 / first.scale
            self.calls.append(calls.of_numpy(np.sqrt if atom.op == "sqrt" else np.reciprocal, first.array.numpy, out.numpy))
        else:
            atom.scale = np.sign(first.scale) if atom.op == "sign" else first.scale**-0.5
            self.calls.append(calls.of_torch(torch.sign if atom.op == "sign" else torch.rsqrt, first.array.tensor, out.tensor))
        return out

    # What the caller reads

    @property
    def before(self) -> np.ndarray:
        return self.forms.spread(self.forms.old.scale)

    def restore(self, step: int) -> None:
        """Make weights and buffers what they are after that step, the last of a `PERIOD`."""
        for new in self.forms.updated:
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
            np.multiply(sizes[:steps, MOVE if self.forms.shared else PART], part_sq, out=part)
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
        forms = self.forms
        # After a period's last step the arrays have been restored.
        final = np.ones_like(self.before[:1]) if forms.steps % PERIOD == 0 else forms.spread(forms.param.scale)[-1:]
        shrink = 1 - forms.keep
        shrinks = bool(shrink.any())
        moved = None if forms.move is None else forms.move[0] * forms.move[1].scale
        return (
            self._column(np.concatenate([self.before, final]) ** 2),
            None if forms.part is None else self._column((forms.part[0] * forms.part[1].scale) ** 2),
            None if moved is None else self._column(moved**2),
            self._column(shrink**2) if shrinks else None,
            self._column(2 * shrink * self.before * moved) if shrinks and moved is not None else None,
        )

    def _column(self, scale: Coefficient) -> np.ndarray:
        values = self.forms.spread(scale)
        return self._by_row(values).numpy() if values.shape[1] > 1 else values.astype(self.sizes.numpy().dtype)
