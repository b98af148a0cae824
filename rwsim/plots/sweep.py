"""Pictures of a hyperparameter sweep: what was measured beside what was predicted.

A sweep is an `xarray.Dataset` of dimensions (optimizer, one per axis) for a grid, (optimizer, point) for scattered points
or a user's own logs, with the variables norm, rotation, rms_update, each also as `_mcse` (one standard error), `_exact` and
`_paper` (predictions), and `settled` (0 where the walk reached no equilibrium). Any of them may be absent.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from rwsim.plots.data import (
    QUANTITIES,
    Axis,
    average_replicates,
    grid_subset,
    named,
    pages,
    read_axes,
    read_quantities,
    spread,
    title,
    value_text,
    words,
)  # fmt: skip
from rwsim.plots.maps import map_figure
from rwsim.plots.points import Curve, line_figure, scatter_figure, trajectory_figure

if TYPE_CHECKING:
    import xarray

# More pages, lines or curves than these are thinned out evenly, and the title says so.
_PAGES = 6
_LINES = 8
_CURVES = 12


def sweep_figures(dataset: "xarray.Dataset") -> dict[str, Figure]:
    """File stem -> figure: `sweep_OPTIMIZER` for each optimizer, and further ones if a third axis varies.

    Two numeric axes of a grid make heat maps, one makes lines, two of scattered points a scatter. Replicates of a grid
    are averaged. Any further axis is held, one figure per value; the title says at what.
    """
    figures: dict[str, Figure] = {}
    for i in range(dataset.sizes["optimizer"]):
        cube = dataset.isel(optimizer=i)
        axes = read_axes(cube)
        stem = _stem("sweep", cube)
        numeric = [a for a in axes if a.numeric and a.varies and a.name != "replicate"]
        if "point" in cube.dims:
            if len(numeric) >= 2:
                figures[stem] = _scatter(cube, axes, numeric)
            else:
                figures[stem] = _lines(cube, axes, cube)
        elif len(numeric) >= 2:
            figures |= _maps(stem, cube, axes, numeric)
        else:
            mean = average_replicates(cube)
            sizes = {str(d): n for d, n in mean.sizes.items()}
            flat = mean.stack(point=list(sizes), create_index=False) if sizes else mean.expand_dims("point")
            figures[stem] = _lines(cube, axes, flat)
    return figures


def save_sweep(dataset: "xarray.Dataset", folder: Path) -> list[Path]:
    """Write `sweep_OPTIMIZER.png` and its further pages to `folder`."""
    return _save(sweep_figures(dataset), folder)


def trajectory_figures(traces: "xarray.Dataset", dataset: "xarray.Dataset") -> dict[str, Figure]:
    """File stem -> figure: `trajectories_OPTIMIZER`, a dozen walks spread over the sweep, with their predictions.

    Args:
        traces: Dimensions of `dataset` and `time` (coordinate in steps); variables norm, rotation, rms_update.
        dataset: The sweep, for the predictions.
    """
    figures: dict[str, Figure] = {}
    for i in range(traces.sizes["optimizer"]):
        cube, walks = dataset.isel(optimizer=i), traces.isel(optimizer=i)
        axes = read_axes(cube)
        notes = []
        if "replicate" in walks.dims:
            notes = [named("replicate", cube["replicate"].values[0])]
            cube, walks = cube.isel(replicate=0), walks.isel(replicate=0)
        sizes = {str(d): n for d, n in walks.sizes.items() if d != "time"}
        picks = grid_subset(sizes, _CURVES)
        if "point" in sizes and "rotation_exact" in cube:
            order = np.argsort(cube["rotation_exact"].values, kind="stable")
            picks = {"point": [int(order[j]) for j in spread(sizes["point"], _CURVES)]}
        count = int(np.prod(list(sizes.values())))
        varying = [a for a in axes if a.varies and a.name != "replicate"]
        curves = []
        for place in np.ndindex(*(len(p) for p in picks.values())):
            at = {d: picks[d][j] for d, j in zip(picks, place, strict=True)}
            walk, point = walks.isel(at), cube.isel(at)
            label = ", ".join(named(a.name, point[a.name].values[()]) for a in varying)
            exact = {q: float(point[f"{q}_exact"]) for q in QUANTITIES if f"{q}_exact" in point}
            curves.append(Curve(label, {str(q): np.asarray(walk[q].values, dtype=float) for q in walk.data_vars}, exact))
        notes = [f"{len(curves)} of {count} walks", *notes] if len(curves) < count else notes
        figures[_stem("trajectories", cube)] = trajectory_figure(title(cube, axes, notes), np.asarray(walks["time"].values), curves)
    return figures


def save_trajectories(traces: "xarray.Dataset", dataset: "xarray.Dataset", folder: Path) -> list[Path]:
    """Write `trajectories_OPTIMIZER.png` to `folder`."""
    return _save(trajectory_figures(traces, dataset), folder)


def _stem(kind: str, cube: "xarray.Dataset") -> str:
    # A user's rule is called FILE.py:RULE, which is no name for a file.
    return f"{kind}_" + re.sub(r"[^\w.=+-]+", "-", str(cube["optimizer"].values))


def _save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    paths = []
    for stem, figure in figures.items():
        paths.append(folder / f"{stem}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def _maps(stem: str, cube: "xarray.Dataset", axes: list[Axis], numeric: list[Axis]) -> dict[str, Figure]:
    x, y = numeric[:2]
    mean = average_replicates(cube).sortby([x.name, y.name])
    rest = [str(d) for d in mean.dims if d not in (x.name, y.name)]
    chosen, count = pages(mean, rest, _PAGES)
    figures: dict[str, Figure] = {}
    for held, page in chosen:
        page = page.transpose(x.name, y.name)
        varied = {name: value for name, value in held.items() if cube.sizes[name] > 1}
        notes = [f"{named(name, value)} (of {cube.sizes[name]} values)" for name, value in varied.items()]
        name = "_".join([stem, *(f"{n}-{value_text(v)}" for n, v in varied.items())]) if figures else stem
        if count > len(chosen) and not figures:
            notes.append(f"{len(chosen)} of {count} such pages drawn")
        rotation = page["rotation_exact"].values if "rotation_exact" in page else np.full((len(x.values), len(y.values)), np.nan)
        figures[name] = map_figure(title(cube, axes, notes), x, y, read_quantities(page), rotation)
    return figures


def _lines(cube: "xarray.Dataset", axes: list[Axis], flat: "xarray.Dataset") -> Figure:
    """One numeric axis, or none: lines over it, one for each value of the others."""
    usable = [a for a in axes if a.name != "replicate"] or [Axis("optimizer", False, np.array([str(cube["optimizer"].values)]))]
    x = min(usable, key=lambda a: (not a.varies, not a.numeric))
    others = [a for a in usable if a.varies and a is not x]
    size = flat.sizes["point"]
    texts = [[named(a.name, v) for v in flat[a.name].values] for a in others]
    labels = [", ".join(column) for column in zip(*texts, strict=True)] if others else [""] * size
    groups = list(dict.fromkeys(labels))
    chosen = [groups[i] for i in spread(len(groups), _LINES)]
    if x.numeric:
        where = flat[x.name].values.astype(float)
    else:
        positions = {value: float(i) for i, value in enumerate(x.values)}
        where = np.array([positions[str(v)] for v in np.broadcast_to(flat[x.name].values, size)])
    lines = []
    for group in chosen:
        members = np.flatnonzero([label == group for label in labels])
        members = members[np.argsort(where[members], kind="stable")]
        lines.append((group, where[members], read_quantities(flat.isel(point=members))))
    notes = [f"{len(chosen)} of {len(groups)} {' and '.join(words(a.name) for a in others)} values"] if len(groups) > len(chosen) else []
    return line_figure(title(cube, axes, notes), x, lines)


def _scatter(cube: "xarray.Dataset", axes: list[Axis], numeric: list[Axis]) -> Figure:
    x, y, *others = numeric
    notes = [f"{words(a.name)} {value_text(a.values[0])} to {value_text(a.values[-1])}" for a in others]
    notes += [f"{len(a.values)} values of {words(a.name)}" for a in axes if a.varies and not a.numeric]
    where = cube[x.name].values.astype(float), cube[y.name].values.astype(float)
    return scatter_figure(title(cube, axes, notes), x, y, where, read_quantities(cube))
