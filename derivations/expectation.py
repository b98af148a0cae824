"""The expectation of the random walk, executed: zero-mean variables, mutually uncorrelated.

`E(x)` stays unevaluated, so that a step can be shown; `E(x).doit()` carries it out by E[g_i g_j] = G delta_ij, term by
term, including infinite sums of gradients. Nothing else is assumed, and a third power of a random variable is refused.
"""

from itertools import product

import sympy as sp

from derivations.sums import geometric
from rwsim.theory import symbols as sym
from rwsim.theory._cache import cached

g = sp.IndexedBase("g")  # the gradients of successive steps, one coordinate
t = sp.Symbol("t", integer=True)


class E(sp.Expr):
    """E[expr]. Random: the gradients g[i] of second moment `sym.grad_sq`, and each further pair (variable, moment).

    Example:
        >>> a, k = sp.Symbol("a", positive=True), sp.Symbol("k", integer=True, positive=True)
        >>> E((a * g[t] + g[t - 1]) * g[t]).doit()
        G*a
    """

    def __new__(cls, expr, *moments):
        return sp.Expr.__new__(cls, sp.sympify(expr), *(sp.Tuple(*pair) for pair in moments))

    def doit(self, **hints):
        return _expectation(self)

    def _latex(self, printer):
        return rf"\mathbb{{E}}\left[{printer._print(self.args[0])}\right]"

    def _sympystr(self, printer):
        return f"E[{printer._print(self.args[0])}]"

    def _pretty(self, printer):
        form = printer._print(self.args[0])
        form = type(form)(*form.parens("[", "]"))
        return type(form)(*form.left("E"))


@cached
def _expectation(e):
    moments = {sp.Symbol("g"): sym.grad_sq, **{variable: moment for variable, moment in e.args[1:]}}
    return sp.Add(*(_expect(term, moments) for term in sp.Add.make_args(sp.expand(e.args[0]))))


def _expect(term, moments):
    fixed, random = [], []
    for factor in sp.Mul.make_args(term):
        base, power = factor.as_base_exp()
        if not any(_kind(atom) in moments for atom in base.free_symbols | base.atoms(sp.Indexed)):
            fixed.append(factor)
        elif power.is_Integer and power > 0:
            random += [base] * int(power)
        else:
            # A refusal, not a gap to fill: a moment that nobody stated is not to be guessed.
            raise NotImplementedError(f"no expectation of {factor}")
    if len(random) > 2:
        # The same: results rest on second moments alone.
        raise NotImplementedError(f"only second moments are known, got {term}")
    if len(random) == 0:
        return term
    if len(random) == 1:
        return sp.Integer(0)
    pairs = product(_linear(random[0], moments), _linear(random[1], moments))
    return sp.Mul(*fixed) * sp.Add(*(_pair(a, b, moments) for a, b in pairs))


def _kind(atom):
    return sp.Symbol(str(atom.base)) if isinstance(atom, sp.Indexed) else atom


def _linear(factor, moments):
    """A random factor as a list of (coefficient, kind of variable, its index, limits of summation)."""
    if not isinstance(factor, sp.Sum):
        return [(sp.Integer(1), _kind(factor), factor.indices[0] if isinstance(factor, sp.Indexed) else None, None)]
    summand, (index, low, high) = factor.function, factor.limits[0]
    terms = []
    for term in sp.Add.make_args(sp.expand(summand)):
        (random,) = [a for a in sp.Mul.make_args(term) if _kind(a) in moments]
        terms.append((term / random, _kind(random), random.indices[0], (index, low, high)))
    return terms


def _pair(a, b, moments):
    """E of a product of two linear terms: only equal indices of one kind of variable survive."""
    if a[1] != b[1]:
        return sp.Integer(0)
    moment = moments[a[1]]
    if a[2] is None:
        return a[0] * b[0] * moment
    if a[3] is None and b[3] is None:
        return a[0] * b[0] * moment * sp.KroneckerDelta(a[2], b[2])
    if a[3] is None:
        a, b = b, a
    index, low, high = a[3]
    inner = sp.Dummy("j", integer=True, nonnegative=True)
    other = b[2] if b[3] is None else b[2].subs(b[3][0], inner)
    slope = sp.diff(a[2], index)
    where = sp.expand(index + (other - a[2]) / slope)  # the summand of `a` that meets the other index
    if b[3] is None:
        inside = sp.And(sp.simplify(where - low) >= 0, True if high is sp.oo else sp.simplify(high - where) >= 0)
        return sp.Piecewise((a[0].subs(index, where) * b[0] * moment, inside), (0, True))
    shift = sp.simplify(where - inner)
    if shift.has(inner):
        # None of the derivations has such a pair; a wrong overlap would be worse than none.
        raise NotImplementedError("sums that run against each other")
    first, last = sp.Max(b[3][1], low - shift), sp.Min(b[3][2], high - shift)
    summand = sp.powsimp(a[0].subs(index, where) * b[0].subs(b[3][0], inner))
    return moment * geometric(summand, inner, first, last)
