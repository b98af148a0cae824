"""What all figures share: names, colours, ticks and scales."""

import numpy as np
from matplotlib.axis import Axis as TickAxis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

# Okabe-Ito: told apart by colour-blind readers too.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#8C8C8C")
QUANTITY_LABELS = {"rms_update": r"RMS update $\eta_g$", "rotation": r"rotation $\eta_r$ (rad/step)", "norm": r"norm $\|\omega\|$"}
OPTIMIZER_TITLES = {"sgdm": "SGDM", "adamw": "AdamW", "adam_l2": r"Adam+$\ell_2$", "lion": "Lion"}

Array = np.ndarray
# Caps of an error map's colours.
_CAPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def is_log(values: Array) -> bool:
    """Whether sorted values are spaced more like a geometric sequence than like an arithmetic one."""
    if len(values) < 2 or values[0] <= 0:
        return False
    if len(values) == 2:
        return bool(values[1] >= 10 * values[0])
    even = np.linspace(0, 1, len(values))
    off = [np.abs((v - v[0]) / (v[-1] - v[0]) - even).max() for v in (values, np.log(values))]
    return bool(off[1] < off[0])


def cell_edges(values: Array, log: bool) -> Array:
    """Edges of the cells around two or more sorted values: midpoints, geometric on a log axis."""
    v = np.log(values) if log else values
    middle = (v[1:] + v[:-1]) / 2
    edges = np.concatenate([[2 * v[0] - middle[0]], middle, [2 * v[-1] - middle[-1]]])
    return np.exp(edges) if log else edges


def round_levels(low: float, high: float, most: int) -> Array:
    """At most `most` round numbers in [low, high], 0 < low < high, evenly spread on a log scale if there are two."""
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for mantissas in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        levels = np.outer(decades, mantissas).ravel()
        levels = levels[(levels >= low * (1 - 1e-9)) & (levels <= high * (1 + 1e-9))]
        if len(levels) <= most:
            break
    else:
        levels = levels[:: int(np.ceil(len(levels) / most))]
    if len(levels) >= 2:
        return levels
    even = np.asarray(MaxNLocator(max(most - 1, 2)).tick_values(low, high))
    return even[(even >= low) & (even <= high)]


def finite(*arrays: Array) -> Array:
    """All finite values, flat."""
    values = np.concatenate([np.ravel(a) for a in arrays])
    return values[np.isfinite(values)]


def color_norm(*arrays: Array) -> Normalize:
    """One colour scale for all arrays: logarithmic if they are positive, and so wide that noise alone does not fill it."""
    values = finite(*arrays)
    if not len(values):
        return Normalize(0, 1)
    low, high = float(values.min()), float(values.max())
    if high - low <= 0.1 * abs(high):
        low, high = low - 0.05 * abs(low) - (low == 0), high + 0.05 * abs(high) + (high == 0)
    return LogNorm(low, high) if low > 0 else Normalize(low, high)


def error_cap(error: Array) -> float:
    """Where the colours of an error map end: a round number that covers 95 % of the errors, 100 % at most."""
    values = np.abs(finite(error))
    reach = np.quantile(values, 0.95) if len(values) else 0.0
    return next((cap for cap in _CAPS if reach <= cap), _CAPS[-1])


def extend(values: Array, norm: Normalize) -> str:
    """Which ends of a colour bar need an arrow."""
    values, low, high = finite(values), norm.vmin, norm.vmax
    below = bool((values < low * (1 - 1e-9)).any()) if low is not None and low > 0 else bool((values < low).any())
    above = bool((values > high).any())
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[below, above]


def number(value: float, _: object = None) -> str:
    """A short decimal: 1e-5, 0.003, 0.9995, 15,000, 1e6."""
    if 0.9 < value < 1:
        return f"{round(value, 1 - int(np.floor(np.log10(1 - value)))):.10g}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


def percent(value: float, _: object = None) -> str:
    """A relative error: +5 %."""
    return f"{100 * value:+.3g} %" if value else "0"


def set_ticks(axis: TickAxis, low: float, high: float) -> None:
    """Few round ticks on a log axis, so that labels cannot touch."""
    axis.set_major_locator(FixedLocator(list(round_levels(low, high, 5))))
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_locator(NullLocator())
