"""Random admissible values of the symbols, always the same ones."""

import random

import mpmath as mp

from rwsim.optimizers.rule import DOMAINS
from rwsim.theory import symbols as sym

POINTS = 30
# Where hyperparameters are drawn from. In all of it lr times weight decay stays below 1 - momentum.
_SHARE = (0.05, 0.9)  # averages, dampening, mixtures: what must lie below 1
_RANGES = {sym.eta: (1e-3, 0.2), sym.lam: (1e-2, 0.5)}
for _name, _symbol in sym.GREEK.items():
    if DOMAINS[_name].high == 1:
        _RANGES.update(dict.fromkeys(_symbol if isinstance(_symbol, tuple) else (_symbol,), _SHARE))


def points(symbols, count=POINTS):
    """`count` random admissible values of `symbols`, always the same ones."""
    rng = random.Random(20240716)
    ordered = sorted(symbols, key=lambda s: (s.name, str(s.assumptions0)))
    for _ in range(count):
        yield {s: _draw(s, rng) for s in ordered}


def _draw(symbol, rng):
    if symbol in _RANGES:
        return mp.mpf(rng.uniform(*_RANGES[symbol]))
    if isinstance(symbol, sym.Hyperparameter):  # a user's own name: whatever it is, it must not make the rule unstable
        return mp.mpf(rng.uniform(*_SHARE))
    if symbol.is_integer:
        return mp.mpf(rng.randint(2, 40))
    return mp.mpf(rng.uniform(0.1, 4.0) if symbol.is_nonnegative else rng.uniform(-3.0, 3.0))
