"""A sweep's dataset as the figures see it: axes, quantities, pages."""

import json
import textwrap
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from rwsim.plots.style import OPTIMIZER_TITLES, Array, is_log, number

if TYPE_CHECKING:
    import xarray

# As `walk.measure` has them, which would bring torch.
QUANTITIES = ("norm", "rotation", "rms_update")
_AXIS_LABELS = {"lr": r"learning rate $\eta$", "weight_decay": r"weight decay $\lambda$"}
_AXIS_LABELS |= {"batch": "batch (samples)", "fan_in": "fan-in (inputs)"}
_WORDS = {"beta_1": r"$\beta_1$", "beta_2": r"$\beta_2$", "eps": r"$\varepsilon$", "fan_in": "fan-in"}


@dataclass(frozen=True)
class Axis:
    """One axis of a sweep: its name, its scale, and its different values, sorted if they are numbers."""

    name: str
    log: bool
    values: Array

    @property
    def numeric(self) -> bool:
        return self.values.dtype.kind in "iuf"

    @property
    def varies(self) -> bool:
        return len(self.values) > 1

    @property
    def few(self) -> bool:
        """So few numbers, so far apart, that a tick at each has room for its label."""
        places = np.log(self.values) if self.log else self.values
        return self.varies and len(places) <= 5 and bool(np.diff(places).min() >= 0.15 * np.ptp(places))

    @property
    def label(self) -> str:
        return _AXIS_LABELS.get(self.name, words(self.name))


@dataclass(frozen=True)
class Quantity:
    """Measured and predicted values of norm, rotation or RMS update; NaN where there is none. Arrays of one shape."""

    name: str
    logged: bool
    measured: Array
    mcse: Array
    exact: Array
    paper: Array
    settled: Array

    @property
    def error(self) -> Array:
        """measured / exact - 1."""
        return self.measured / np.where(self.exact == 0, np.nan, self.exact) - 1

    @property
    def under_way(self) -> Array:
        """Measured, but not in equilibrium."""
        return np.isfinite(self.measured) & ~self.settled

    @property
    def trusted(self) -> Array:
        """Measured in equilibrium: what colour scales are made for. Everything measured if no walk settled."""
        return np.where(self.settled, self.measured, np.nan) if (self.settled & np.isfinite(self.measured)).any() else self.measured

    @property
    def trusted_error(self) -> Array:
        return replace(self, measured=self.trusted).error


def words(name: str) -> str:
    """A name as titles and legends show it."""
    return _WORDS.get(name, name.replace("_", " "))


def value_text(value: object) -> str:
    return number(float(value)) if isinstance(value, (int, float, np.number)) else str(value)


def named(name: str, value: object) -> str:
    return f"{words(name)} {value_text(value)}"


def read_quantities(page: "xarray.Dataset") -> list[Quantity]:
    """What the page holds, as arrays; all three quantities if it holds none."""
    shape = tuple(page.sizes.values())

    def array(name: str) -> Array:
        return page[name].transpose(*page.dims).values.astype(float) if name in page else np.full(shape, np.nan)

    settled = array("settled") != 0 if "settled" in page else np.ones(shape, dtype=bool)
    present = [q for q in QUANTITIES if q in page or f"{q}_exact" in page]
    return [
        Quantity(q, q in page, array(q), array(f"{q}_mcse"), array(f"{q}_exact"), array(f"{q}_paper"), settled)
        for q in present or QUANTITIES
    ]


def read_axes(cube: "xarray.Dataset") -> list[Axis]:
    """The axes in their order, from the attribute `axes` ("lr:log,momentum:list"); without it, all dimensions or coordinates."""
    declared = dict(item.strip().partition(":")[::2] for item in cube.attrs.get("axes", "").split(",") if item.strip())
    names = declared or {n: "" for n in (cube.coords if "point" in cube.dims else cube.dims) if n not in ("optimizer", "point", "time")}
    axes = []
    for name in names:
        if name not in cube.coords:
            continue
        values = cube[name].values
        if values.dtype.kind in "iuf":
            values = np.unique(values[np.isfinite(values)])
            log = bool(len(values) and values[0] > 0) and (is_log(values) if names[name] not in ("log", "linear") else names[name] == "log")
        else:
            values, log = np.array(list(dict.fromkeys(str(v) for v in np.ravel(values))), dtype=str), False
        axes.append(Axis(str(name), log, values))
    return axes


def average_replicates(cube: "xarray.Dataset") -> "xarray.Dataset":
    """Mean over replicates; NaN where one diverged, not settled where one did not settle."""
    if "replicate" not in cube.dims:
        return cube
    mean = cube.mean("replicate", skipna=False, keep_attrs=True)
    count = cube.sizes["replicate"]
    for name in cube.data_vars:
        if str(name).endswith("_mcse"):
            mean[name] = (cube[name] ** 2).sum("replicate", skipna=False) ** 0.5 / count
    if "settled" in cube:
        mean["settled"] = cube["settled"].min("replicate")
    return mean


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spread, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most)).round()})


def pages(cube: "xarray.Dataset", dims: list[str], most: int) -> tuple[list[tuple[dict[str, object], "xarray.Dataset"]], int]:
    """At most `most` slices at fixed values of `dims`, with those values; and how many slices there are in all."""
    places = list(product(*(range(cube.sizes[d]) for d in dims)))
    chosen = [dict(zip(dims, places[i], strict=True)) for i in spread(len(places), most)]
    return [({d: cube[d].values[i] for d, i in place.items()}, cube.isel(place)) for place in chosen], len(places)


def grid_subset(sizes: dict[str, int], most: int) -> dict[str, list[int]]:
    """Indices along each dimension, evenly spread, of a sub-grid of at most `most` points."""
    counts = dict.fromkeys(sizes, 1)
    while growing := [d for d in sizes if counts[d] < sizes[d] and prod(counts.values()) // counts[d] * (counts[d] + 1) <= most]:
        counts[min(growing, key=counts.__getitem__)] += 1
    return {d: spread(sizes[d], counts[d]) for d in sizes}


def title(cube: "xarray.Dataset", axes: list[Axis], notes: list[str]) -> str:
    """Optimizer, what is held fixed and what was walked."""
    name = str(cube["optimizer"].values)
    held = [named(a.name, a.values[0]) for a in axes if len(a.values) == 1 and a.name != "replicate"]
    fixed = json.loads(cube.attrs.get("hyper", "{}"))
    held += [f"{words(k)} {', '.join(map(value_text, np.atleast_1d(v).tolist()))}" for k, v in fixed.items()]
    replicates = cube.sizes.get("replicate", 1)
    walked = [f"mean of {replicates} replicates"] if replicates > 1 else []
    known = {a.name for a in axes}
    walked += [f"{value_text(cube.attrs[k])} {k}" for k in ("steps", "neurons") if k in cube.attrs and k not in known]
    walked += [named(k, cube.attrs[k]) for k in ("fan_in", "batch", "loss_scale") if cube.attrs.get(k) is not None and k not in known]
    walked += [f"{cube.attrs['gradient']} gradient"] if "gradient" in cube.attrs else []
    lines = textwrap.wrap(", ".join([*notes, *held, *walked]), 110)
    return "\n".join([OPTIMIZER_TITLES.get(name, name), *lines])
