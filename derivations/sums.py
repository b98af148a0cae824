"""Geometric sums, quickly: every kernel here is one, and sympy's general summation takes a hundred times as long."""

import sympy as sp

from derivations.sample import points
from rwsim.theory._cache import cached


@cached
def geometric(summand, index, first, last=sp.oo):
    """sum of `summand` over index = first ... last, for a summand whose consecutive terms have a constant ratio.

    Raises:
        NotImplementedError: The ratio is not constant.
        ValueError: An infinite sum that does not converge at every admissible point.
    """
    if summand == 0:
        return sp.Integer(0)
    ratio = sp.simplify(sp.powsimp(sp.expand(summand.subs(index, index + 1) / summand)))
    if ratio.has(index):
        # A refusal that the caller hears of: it then leaves the sum to sympy.
        raise NotImplementedError(f"{summand} is not geometric in {index}")
    start = summand.subs(index, first)
    if last is not sp.oo:
        return (start - summand.subs(index, last + 1)) / (1 - ratio)
    if not all(abs(sp.N(ratio.subs(point))) < 1 for point in points(ratio.free_symbols)):
        raise ValueError(f"the sum of {summand} does not converge")
    return start / (1 - ratio)


def summed(expr):
    """`expr` with its geometric sums carried out, term by term; other sums are left to sympy."""

    def one(total):
        index, first, last = total.limits[0]
        try:
            return sp.Add(*(geometric(term, index, first, last) for term in sp.Add.make_args(sp.expand(total.function))))
        except NotImplementedError:  # not geometric: left to sympy, as said
            return total

    return expr.replace(lambda e: isinstance(e, sp.Sum) and len(e.limits) == 1, one)
