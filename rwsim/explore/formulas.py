"""The theory as JavaScript: every formula of the page is printed from the symbols that `rwsim.predict` is made of.

Printed are the closed forms, the coefficients of one step of the moment recurrence, the gradient law and the schedules. What is
an algorithm rather than a formula (a root, a sum over lags, Gauss nodes) is in `runtime.js`.
"""

import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import sympy as sp
from sympy.printing.jscode import JavascriptCodePrinter
from sympy.printing.precedence import PRECEDENCE

from rwsim.optimizers import RULES, UpdateRule
from rwsim.theory import equilibrium, factors, noise, paper, signs, walker
from rwsim.theory import symbols as sym
from rwsim.theory.forms import forms_of, settled, square, stability
from rwsim.theory.rates import memory, relaxation_rate
from rwsim.theory.recurrence import Compiled, recurrence
from rwsim.theory.response import argument_kernel, lag
from rwsim.theory.signs import summed_closure


def _unevaluated(kind: Any) -> Any:
    """To work out which of two symbols is the larger one takes long, and they do not say."""
    return lambda a, b: kind(a, b, evaluate=False)


_least, _most = _unevaluated(sp.Min), _unevaluated(sp.Max)
# The functions that formulas shared by numbers and arrays take from numpy, on symbols.
XP = SimpleNamespace(
    sqrt=sp.sqrt, arcsin=sp.asin, arctan2=sp.atan2, cos=sp.cos, pi=sp.pi, minimum=_least, maximum=_most,
    clip=lambda x, low, high: _least(_most(x, low), high),
    where=lambda condition, yes, no: sp.Piecewise((yes, condition), (no, True)),
)  # fmt: skip
# eta_g/||omega||, which a time constant hangs on where the decay passes through the normalizer.
relative_update = sp.Symbol("relative_update", positive=True)
_q, _b, _scale, _neurons = sp.symbols("q B loss_scale K", positive=True)
# Rules that the paper's Table 1 has, in its order.
NAMES = tuple(paper.TABLE_1)


class _Printer(JavascriptCodePrinter):
    """Whole powers as products: exact, and faster than Math.pow."""

    def _print_Pow(self, expr: sp.Pow) -> str:
        if expr.exp.is_Integer and 2 <= abs(expr.exp) <= 4:
            product = "*".join([self.parenthesize(expr.base, PRECEDENCE["Pow"])] * abs(int(expr.exp)))
            return f"({product})" if expr.exp > 0 else f"(1/({product}))"
        return super()._print_Pow(expr)


def function(arguments: Sequence[sp.Symbol], expressions: Sequence[Any]) -> str:
    """A JavaScript function of `arguments` that returns the expressions' values as an array.

    Example:
        >>> x, y = sp.symbols("x y")
        >>> print(function((x, y), [sp.sqrt(x + y), (x + y) ** 2]))
        (x, y) => {
          const _0 = x + y;
          return [Math.sqrt(_0), (_0*_0)];
        }
    """
    shared, results = sp.cse([sp.sympify(e) for e in expressions], symbols=sp.numbered_symbols("_"), list=True)
    printer = _Printer()
    lines = [f"  const {name} = {printer.doprint(value)};" for name, value in shared]
    known = {str(a) for a in (*arguments, *(name for name, _ in shared))}
    unknown = {str(s) for e in (*results, *(value for _, value in shared)) for s in e.free_symbols} - known
    if unknown:
        raise ValueError(f"not among the arguments: {', '.join(sorted(unknown))}")
    body = ", ".join(_inline(printer, e) for e in results)
    return "\n".join([f"({', '.join(map(str, arguments))}) => {{", *lines, f"  return [{body}];", "}"])


def _inline(printer: JavascriptCodePrinter, expression: sp.Expr) -> str:
    """A conditional as an expression, not as statements."""
    text = printer.doprint(sp.Piecewise(*expression.args) if isinstance(expression, sp.Piecewise) else expression)
    return " ".join(text.split())


def _compiled(*parts: Compiled) -> str:
    """Functions of the same arguments as one."""
    return function(parts[0].arguments, [e for part in parts for e in part.expressions])


def law() -> dict[str, str]:
    """The toy system's gradients where all coordinates are alike (gammas of one)."""
    scale_sq = noise.output_scale_sq(1, _scale, _neurons, _b)
    moment = noise.coordinate_moment(scale_sq, 1 / sym.C, sym.C * _q)
    x = sp.Symbol("x")
    return {
        "moment": function((_q, sym.C, _b, _scale, _neurons), [moment]),
        "jacobi": function((_b,), noise.jacobi_exponents(_b)),
        "length": function((x, _b), [noise.length_sq_at(x, _b)]),
    }


def shapes() -> dict[str, str]:
    """Schedules of lr by name, and the warmup before them."""
    rest, step, warm = sp.symbols("rest step warm", nonnegative=True)
    found = {name: function((rest,), [factors.factor(name, rest, XP)]) for name in factors.SHAPES}
    return {"warmup": function((step, warm), [factors.ramp(step, warm)]), **found}


def common() -> dict[str, str]:
    """What is the same for every rule."""
    own, lagged, shared, past_sq, early, late = pair = sp.symbols("own lagged shared past early late", real=True)
    before, after, across, drift, past, node, rho = sp.symbols("before after across drift past node rho", real=True)
    return {
        "product": function(pair, [signs.sign_product(own, lagged, shared, past_sq, early, late, XP)]),
        "turned": function((before, after, across, drift), [walker.turned(before, after, across, drift, XP)]),
        "gain": function((past, own, node), [signs.sign_gain(past, own, node, XP)]),
        "beyond": function((rho,), [signs.arcsine_beyond(rho, XP)]),
    }


def aggregates(turn: Any, spread: Any, update_sq: Any) -> list[sp.Expr]:
    """Norm, rotation and RMS update of C alike coordinates, from 1 - lag one/E omega^2, E omega^2 and E of the squared update."""
    relative_sq = _least(2 * turn, 4)
    return [sp.sqrt(sym.C * spread), 2 * sp.asin(sp.sqrt(relative_sq) / 2), sp.sqrt(sym.C * update_sq)]


def rational(rule: type[UpdateRule]) -> tuple[sp.Expr, sp.Expr, list[sp.Expr]]:
    """E g_c^2 and E omega_c^2 as functions of the normalizer D (of `sym.grad_sq` without one), and norm, rotation and RMS update as
    functions of D, `sym.grad_sq` and E omega_c^2.

    The normalizer's square holds weights and gradients, D^2 = c_w E omega^2 + c_g G; that is solved for G.
    """
    forms = forms_of(rule)
    weight, turn, update = (scale * shape for scale, shape in (forms.weight, forms.turn, forms.update))
    grad: sp.Expr = sym.grad_sq
    if settled(rule).square is not None:
        of_weight, of_grad = square(rule)
        grad = sym.normalizer**2 / (of_grad + of_weight * weight)
    return grad, grad * weight, aggregates(turn, _q, sym.grad_sq * update)


def table_1(expression: sp.Expr) -> sp.Expr:
    """An entry of Table 1 with the gradient's moments where C coordinates are alike, of E g_c^2 and E omega_c^2."""
    unit_sq = sym.grad_sq * sym.C * _q
    moments = {
        paper.grad_norm_sq: sym.C * sym.grad_sq,
        paper.unit_grad_norm_sq: sym.C * unit_sq,
        paper.unit_grad_l1: sym.C * sp.sqrt(unit_sq),
    }
    return expression.subs(moments)


def time_constant(rule: type[UpdateRule]) -> sp.Expr:
    """Steps in which E||omega||^2 forgets its start; see `rwsim.theory.transient.time_constants`."""
    rate = relaxation_rate(rule)
    return 1 / (memory(rule) * relative_update**2 if rate.has(sym.normalizer) else rate)


def rule_functions(rule: type[UpdateRule]) -> dict[str, str]:
    """The functions of one rule by name."""
    hyper = sym.flat(sym.hyper_symbols(rule))
    column, steps, response = paper.TABLE_1[rule.name], recurrence(rule), settled(rule)
    found = {
        "paper": function((*hyper, sym.C, sym.grad_sq, _q), [table_1(e) for e in (column.norm, column.rotation, column.rms_update)]),
        "timeConstant": function((*hyper, relative_update), [time_constant(rule)]),
        "step": _compiled(steps.plain, steps.moved),
        "system": _compiled(steps.system),
    }
    if steps.plain_normalizer is not None:
        found["normalizer"] = _compiled(steps.plain_normalizer)
    if response.direction != "sign":
        grad, spread, exact = rational(rule)
        found["moments"] = function((*hyper, sym.normalizer if response.square is not None else sym.grad_sq), [grad, spread])
        found["exact"] = function((*hyper, sym.normalizer, sym.C, sym.grad_sq, _q), exact)
        found["stability"] = function((*hyper, sym.normalizer), stability(rule))
        return found
    assert steps.argument is not None
    found["argument"] = _compiled(steps.argument)
    summed = sp.Symbol("summed", real=True)
    kernel = argument_kernel(rule)
    first = sp.simplify(kernel.tail.subs(lag, 1))
    rate = sp.simplify(kernel.tail.subs(lag, lag + 1) / kernel.tail)
    # sum_{j>=1} a_j a_{j+k} = rate^k sum a_j^2, a geometric series.
    found["kernel"] = function(hyper, [kernel.head, first, rate, first**2 / (1 - rate**2)])
    decay, drive = sp.expand(1 - response.transition[0, 0]), response.sign_drive[0]
    relative, turn = summed_closure(decay, summed)
    found["decay"] = function(hyper, [decay])
    found["moments"] = function((*hyper, summed), [drive**2 * relative])
    found["exact"] = function((*hyper, summed, sym.C), aggregates(turn, drive**2 * relative, drive**2))
    return found


def facts(rule: type[UpdateRule]) -> dict[str, Any]:
    """What `runtime.js` asks of a rule besides its functions."""
    names = [name for name, default in rule.hyper.items() for _ in (default if isinstance(default, tuple) else (0,))]
    sign = settled(rule).direction == "sign"
    return {
        "direction": settled(rule).direction,
        "states": recurrence(rule).states,
        "bends": not sign and any(c.has(sym.normalizer) for c in stability(rule)),
        "tail": signs.KERNEL_TAIL,
        "lr": names.index("lr"),
        "needed": [[names.index(name), str(equilibrium.no_equilibrium(name))] for name in ("lr", "weight_decay") if name in names],
        "unstable": "no stable equilibrium: lr times weight decay " + ("must lie in (0, 2)." if sign else "is too large."),
    }


@cache
def javascript() -> str:
    """An object literal: `law`, `shapes`, `common`, and `rules` by name with their functions and `facts`."""
    rules = {
        name: _object({**{key: json.dumps(value) for key, value in facts(RULES[name]).items()}, **rule_functions(RULES[name])})
        for name in NAMES
    }
    parts = {"law": law(), "shapes": shapes(), "common": common(), "rules": rules}
    return _object({"linear": str(signs.LINEAR), **{name: _object(part) for name, part in parts.items()}})


def _object(members: dict[str, str]) -> str:
    return "{\n" + ",\n".join(f'"{name}": {value}' for name, value in members.items()) + "\n}"
