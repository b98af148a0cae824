"""Pictures of a sweep: what they show, and that no shape of a sweep breaks them."""

import os
import subprocess
import sys
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import LogNorm, same_color
from matplotlib.patches import PathPatch

import rwsim
from rwsim.plots import save_sweep, save_trajectories, sweep_figures, trajectory_figures
from rwsim.plots.data import average_replicates, grid_subset, pages, read_axes, read_quantities
from rwsim.plots.maps import CONTOUR_LABEL, DIVERGED, DIVERGED_LABEL, UNDER_WAY_LABEL
from rwsim.plots.style import cell_edges, color_norm, error_cap, is_log, number, round_levels

xarray = pytest.importorskip("xarray", reason="the sweep extra is not installed")
QUANTITIES = ("norm", "rotation", "rms_update")


def sweep(optimizers=("adamw",), noise=0.004, point=False, axes=None, **coordinates):
    """AdamW's Table 1 as prediction, with noise as measurement; `coordinates` are the axes, along `point` or as a grid."""
    coordinates = {name: np.asarray(values) for name, values in coordinates.items()}
    dims = ("point",) if point else tuple(coordinates)
    variables = {name: xarray.DataArray(v, dims="point" if point else name) for name, v in coordinates.items()}
    template = sum((xarray.zeros_like(v, dtype=float) for v in variables.values()), xarray.DataArray(0.0))
    lr, wd, beta = (variables.get(n, d) + template for n, d in (("lr", 0.01), ("weight_decay", 0.1), ("beta_1", 0.9)))
    law = predictions(lr, wd, beta)
    random = np.random.default_rng(0)
    data = {}
    for name, exact in law.items():
        exact = exact.transpose(*dims)
        measured = exact * (1 + noise * random.standard_normal(exact.shape))
        for suffix, value in (("", measured), ("_mcse", noise * exact), ("_exact", exact), ("_paper", 1.01 * exact)):
            data[name + suffix] = value.drop_vars(list(value.coords)).expand_dims(optimizer=list(optimizers))
    data["settled"] = xarray.ones_like(data["norm"], dtype=np.int8)
    attributes = {"steps": 3000, "neurons": 16, "fan_in": 128, "batch": 32, "gradient": "marginal", "loss_scale": 1.0}
    attributes["axes"] = axes or ",".join(f"{n}:{'log' if n in ('lr', 'weight_decay') else 'list'}" for n in coordinates)
    named = {name: ("point", v) if point else v for name, v in coordinates.items()}
    return xarray.Dataset(data, {"optimizer": list(optimizers), **named}, attributes)


def predictions(lr, wd, beta):
    rule = rwsim.predict("adamw", lr=0.01, weight_decay=0.1, betas=(0.9, 0.99), fan_in=128).paper
    damping = (1 - beta) / (1 + beta) * 19
    return {
        "norm": rule.norm * (lr / wd / 0.1) ** 0.5,
        "rotation": rule.rotation * (lr * wd / 0.001 * damping) ** 0.5,
        "rms_update": rule.rms_update * lr / 0.01 * damping**0.5,
    }


GRID = {"lr": np.geomspace(1e-3, 1e-1, 6), "weight_decay": np.geomspace(1e-2, 1, 5)}
LINE = {"lr": np.geomspace(1e-3, 1e-1, 5), "schedule": ["constant", "cosine", "warmup"]}


def cloud(count=12):
    random = np.random.default_rng(1)
    return {"lr": 10 ** random.uniform(-3, -1, count), "weight_decay": 10 ** random.uniform(-2, 0, count)}


@pytest.fixture(scope="module")
def calm():
    """A grid on which nothing went wrong, and its figure: drawn once, as laying out nine panels takes a second."""
    data = sweep(**GRID)
    (figure,) = sweep_figures(data).values()
    yield data, figure
    plt.close(figure)


@pytest.fixture(scope="module")
def troubled():
    """Three walks under way, one of them far off; one diverged; one settled walk off by a factor; rotation not logged."""
    data = sweep(**GRID).drop_vars("rotation")
    data["settled"][0, 0, 1:3] = 0
    data["settled"][0, 4, 0] = 0
    data["norm"][0, 0, 1] = 1e6
    data["norm"][0, 5, 4] = data["rms_update"][0, 5, 4] = np.nan
    data["settled"][0, 5, 4] = 0
    data["norm"][0, 2, 2] *= 1.5
    (figure,) = sweep_figures(data).values()
    yield data, figure
    plt.close(figure)


@pytest.fixture(autouse=True)
def _close():
    before = plt.get_fignums()
    yield
    for figure in set(plt.get_fignums()) - set(before):
        plt.close(figure)


def panels(figure):
    """Axes with data, row by row, without colour bars."""
    return [a for a in figure.axes if a.get_label() != "<colorbar>"]


def bars(figure):
    return [a for a in figure.axes if a.get_label() == "<colorbar>"]


def legend(figure):
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


def hatches(axis):
    return [p for p in axis.patches if isinstance(p, PathPatch) and p.get_gid() == "unsettled"]


def contours(axis):
    return [c for c in axis.collections if type(c).__name__ == "QuadContourSet"]


def of_gid(axis, gid):
    return [a for a in axis.get_children() if a.get_gid() == gid]


def test_maps_show_measured_predicted_and_error(calm):
    data, figure = calm
    grid = panels(figure)
    assert len(grid) == 9 and len(bars(figure)) == 6
    assert [a.get_title() for a in grid[:3]] == ["measured", "predicted (exact)", "relative error, measured / exact − 1"]  # noqa: RUF001
    assert [bar.get_ylabel().split()[0] for bar in bars(figure)[::2]] == ["norm", "rotation", "RMS"]
    assert "(rad/step)" in bars(figure)[2].get_ylabel()
    assert grid[-1].get_xlabel() == r"learning rate $\eta$" and grid[0].get_ylabel() == r"weight decay $\lambda$"
    assert grid[0].get_xscale() == grid[0].get_yscale() == "log"
    for row, name in enumerate(QUANTITIES):
        meshes = [axis.collections[0] for axis in grid[3 * row : 3 * row + 3]]
        assert isinstance(meshes[0].norm, LogNorm) and (meshes[0].get_clim() == meshes[1].get_clim())
        np.testing.assert_allclose(meshes[0].get_array(), data[name][0].values.T)
        np.testing.assert_allclose(meshes[1].get_array(), data[f"{name}_exact"][0].values.T)
        np.testing.assert_allclose(meshes[2].get_array(), (data[name] / data[f"{name}_exact"] - 1)[0].values.T)
        assert meshes[2].norm.vmin == -meshes[2].norm.vmax
    assert "AdamW" in figure.get_suptitle() and "3,000 steps" in figure.get_suptitle()


def test_contours_are_the_predicted_rotation(calm):
    data, figure = calm
    rotation = data["rotation_exact"][0]
    for column, axis in enumerate(panels(figure)[:3]):
        drawn = contours(axis)
        assert len(drawn) == (column < 2)
        for lines in drawn:
            assert len(lines.levels) >= 3 and rotation.min() < lines.levels[0] and lines.levels[-1] < rotation.max()
            assert {text.get_text() for text in lines.labelTexts} <= {number(v) for v in lines.levels}
            assert lines.labelTexts
            # Along AdamW's contour lr x weight_decay is constant.
            for level, path in zip(lines.levels, lines.get_paths(), strict=True):
                product = path.vertices.prod(axis=1)
                np.testing.assert_allclose(product, product[0], rtol=0.2)
                assert product[0] == pytest.approx(1e-3 * (level / predictions(0.01, 0.1, 0.9)["rotation"]) ** 2, rel=0.2)


def test_lines_of_constant_product(calm):
    _, figure = calm
    for column, axis in enumerate(panels(figure)[:3]):
        lines, labels = of_gid(axis, "product"), of_gid(axis, "product label")
        assert len(lines) >= 3 and len(labels) == (len(lines) if column == 2 else 0)
        for line in lines:
            product = np.prod(line.get_xydata(), axis=1)
            np.testing.assert_allclose(product, product[0])
        (x0, x1), (y0, y1) = axis.get_xlim(), axis.get_ylim()
        assert all(x0 <= t.get_position()[0] <= x1 and y0 <= t.get_position()[1] <= y1 for t in labels)
    other = sweep_figures(sweep(lr=GRID["lr"], beta_1=[0.5, 0.7, 0.9]))["sweep_adamw"]
    assert not of_gid(panels(other)[0], "product") and contours(panels(other)[0])


def test_labels_lie_apart():
    (figure,) = sweep_figures(sweep(lr=np.geomspace(1e-4, 1e-1, 20), weight_decay=np.geomspace(1e-3, 3, 20))).values()
    figure.draw_without_rendering()
    for axis in panels(figure):
        texts = [t for c in contours(axis) for t in c.labelTexts] + of_gid(axis, "product label")
        # A box around turned text is larger than the text: the centres must be further apart than a line of text.
        places = np.array([axis.transData.transform(t.get_position()) for t in texts])
        for i, place in enumerate(places):
            assert (np.hypot(*(places[:i] - place).T) > 12).all()
        ticks = [t.get_window_extent() for t in axis.get_xticklabels() if t.get_text() and t.get_visible()]
        assert all(a.x1 < b.x0 for a, b in pairwise(ticks))
    assert not any(a.get_window_extent().overlaps(figure.legends[0].get_window_extent()) for a in panels(figure))


def test_unsettled_cells_are_hatched_and_leave_the_scales_alone(calm, troubled):
    assert not any(hatches(axis) for axis in panels(calm[1])) and UNDER_WAY_LABEL not in legend(calm[1])
    data, figure = troubled
    assert UNDER_WAY_LABEL in legend(figure)
    under_way = (data["settled"][0].values == 0) & np.isfinite(data["norm"][0].values)
    assert under_way.sum() == 3
    for i, axis in enumerate(panels(figure)):
        assert len(hatches(axis)) == (i in (0, 2, 6, 8)), "measured and error, where there is a measurement"
        for patch in hatches(axis):
            assert patch.get_hatch()
            # The cells, and no other, lie inside.
            inside = [[patch.get_path().contains_point((x, y)) for y in GRID["weight_decay"]] for x in GRID["lr"]]
            np.testing.assert_array_equal(inside, under_way)
    assert panels(figure)[0].collections[0].norm.vmax < 1e3
    assert panels(figure)[2].collections[0].norm.vmax <= 0.05


def test_diverged_cells_have_their_own_colour(calm, troubled):
    assert DIVERGED_LABEL not in legend(calm[1])
    _, figure = troubled
    assert DIVERGED_LABEL in legend(figure)
    mesh = panels(figure)[0].collections[0]
    mesh.update_scalarmappable()
    colors = mesh.get_facecolors().reshape(5, 6, 4)
    hit = [[same_color(colors[j, i], DIVERGED) for i in range(6)] for j in range(5)]
    assert np.argwhere(hit).tolist() == [[4, 5]]
    assert same_color(mesh.cmap.get_bad(), DIVERGED)


def test_cell_edges(calm):
    np.testing.assert_allclose(cell_edges(np.array([0.01, 0.1, 1.0]), True), 10.0 ** np.array([-2.5, -1.5, -0.5, 0.5]))
    np.testing.assert_allclose(cell_edges(np.array([1.0, 2.0, 4.0]), False), [0.5, 1.5, 3, 5])
    figure = calm[1]
    x = panels(figure)[0].collections[0].get_coordinates()[0, :, 0]
    np.testing.assert_allclose(x[1:-1] ** 2, GRID["lr"][1:] * GRID["lr"][:-1])
    assert panels(figure)[0].get_xlim() == (x[0], x[-1])


def test_scales():
    assert [is_log(np.array(v)) for v in ([1, 2, 4, 8], [1, 2, 3, 4], [0.01, 1], [0.9, 0.99], [0, 1, 10], [1])] == [
        True,
        False,
        True,
        *[False] * 3,
    ]
    assert round_levels(1e-3, 1e-1, 6).tolist() == pytest.approx([1e-3, 3e-3, 1e-2, 3e-2, 1e-1])
    assert round_levels(1e-6, 1e6, 5).tolist() == pytest.approx([1e-6, 1e-3, 1, 1e3, 1e6])
    assert len(round_levels(1.01, 1.04, 5)) >= 2
    assert error_cap(np.array([0.003, -0.004, np.nan])) == 0.01 and error_cap(np.array([7.0])) == 1 and error_cap(np.array([])) == 0.01
    assert isinstance(color_norm(np.array([1.0, 1.0])), LogNorm) and not isinstance(color_norm(np.array([-1.0, 1.0])), LogNorm)
    assert [number(v) for v in (1e-5, 0.003, 0.9, 0.999, 0.9999, 15000.0, 1e6)] == [
        "1e-5",
        "0.003",
        "0.9",
        "0.999",
        "0.9999",
        "15,000",
        "1e6",
    ]
    assert grid_subset({"a": 20, "b": 20, "c": 2}, 12) == {"a": [0, 10, 19], "b": [0, 19], "c": [0, 1]}


def test_few_values_are_their_own_ticks(calm):
    data, figure = calm
    axis = panels(figure)[0]
    np.testing.assert_allclose(axis.get_yticks(), GRID["weight_decay"])
    # Six are too many: round numbers instead.
    assert axis.get_xticks().tolist() == pytest.approx([0.001, 0.003, 0.01, 0.03, 0.1])
    assert [a.few for a in read_axes(data.isel(optimizer=0))] == [False, True]


def test_capped_error_says_so(calm, troubled):
    assert bars(troubled[1])[1].get_ylabel() == "error (colours end at ±1 %)"
    # Of its 30 errors of a standard deviation of 0.4 % none lies outside.
    assert bars(calm[1])[1].get_ylabel() == "error"


def test_third_axis_gets_pages_and_replicates_are_averaged():
    data = sweep(lr=[0.1, 0.2], weight_decay=[0.1, 0.2], beta_1=[0.5, 0.9], replicate=[0, 1, 2, 3])
    figures = sweep_figures(data)
    assert list(figures) == ["sweep_adamw", "sweep_adamw_beta_1-0.9"]
    first, second = (f.get_suptitle() for f in figures.values())
    assert r"$\beta_1$ 0.5 (of 2 values)" in first and r"$\beta_1$ 0.9 (of 2 values)" in second and "mean of 4 replicates" in first
    mean = data["norm"][0].isel(beta_1=1).mean("replicate").values
    np.testing.assert_allclose(panels(figures["sweep_adamw_beta_1-0.9"])[0].collections[0].get_array(), mean.T)


def test_many_pages_are_thinned_out():
    cube = sweep(lr=[0.1, 0.2], weight_decay=[0.1, 0.2], beta_1=np.linspace(0.1, 0.9, 9)).isel(optimizer=0)
    chosen, count = pages(cube, ["beta_1"], 3)
    assert count == 9 and [held["beta_1"] for held, _ in chosen] == pytest.approx([0.1, 0.5, 0.9])
    assert all(page["norm"].shape == (2, 2) for _, page in chosen)


def test_replicates_diverged_or_under_way_are_not_hidden():
    data = sweep(lr=[0.1, 0.2], replicate=[0, 1, 2, 3]).isel(optimizer=0)
    data["norm"][0, 2] = np.nan
    data["settled"][1, 3] = 0
    mean = average_replicates(data)
    assert np.isnan(mean["norm"].values).tolist() == [True, False] and mean["settled"].values.tolist() == [1, 0]
    np.testing.assert_allclose(mean["norm_mcse"], data["norm_mcse"].isel(replicate=0) / 2)


def test_one_axis_makes_lines_with_error_bars():
    data = sweep(**LINE)
    data["settled"][0, 0, :] = 0
    data["rotation"][0, 4, 1] = np.nan
    figure = sweep_figures(data)["sweep_adamw"]
    grid = panels(figure)
    assert len(grid) == 6 and not bars(figure)
    assert legend(figure)[:3] == ["schedule constant", "schedule cosine", "schedule warmup"]
    assert {"exact", "Table 1", UNDER_WAY_LABEL, DIVERGED_LABEL} <= set(legend(figure))
    solid = [line for line in grid[0].lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 5]
    dashed = [line for line in grid[0].lines if line.get_linestyle() == "--"]
    assert len(solid) == len(dashed) == 3
    np.testing.assert_allclose(solid[0].get_ydata(), data["norm_exact"][0, :, 0])
    np.testing.assert_allclose(dashed[0].get_ydata(), data["norm_paper"][0, :, 0])
    assert len(grid[0].containers) == 6, "settled and unsettled, each of three lines"
    segments = grid[0].containers[0].lines[2][0].get_segments()
    np.testing.assert_allclose([(s[1, 1] - s[0, 1]) / 2 for s in segments], data["norm_mcse"][0, 1:, 0])
    assert same_color(grid[0].containers[1].lines[0].get_markerfacecolor(), "white")
    crosses = [line for line in grid[2].lines if line.get_marker() == "X" and len(line.get_xdata())]
    assert [line.get_xdata().tolist() for line in crosses] == [pytest.approx([0.1])]


def test_prediction_of_a_single_point_is_seen():
    figure = sweep_figures(sweep(lr=[0.1], weight_decay=[0.1]))["sweep_adamw"]
    assert [line.get_marker() for line in panels(figure)[0].lines[:2]] == ["_", "_"]


def test_points_beyond_an_error_frame_are_counted():
    data = sweep(lr=LINE["lr"])
    data["norm"][0, 0] *= 5
    data["settled"][0, 0] = 0
    figure = sweep_figures(data)["sweep_adamw"]
    assert [[t.get_text() for t in axis.texts] for axis in panels(figure)[1::2]] == [["1 points outside the frame"], [], []]


def test_scattered_points_and_parity():
    data = sweep(point=True, **cloud())
    data["settled"][0, 3] = 0
    data["norm"][0, 5] = np.nan
    figure = sweep_figures(data)["sweep_adamw"]
    grid = panels(figure)
    assert len(grid) == 9 and grid[2].get_title() == "measured against exact"
    settled, under_way, gone = grid[0].collections
    assert len(settled.get_offsets()) == 10 and len(under_way.get_offsets()) == 1
    np.testing.assert_allclose(gone.get_offsets(), [[data["lr"][5], data["weight_decay"][5]]])
    assert same_color(gone.get_facecolor()[0], DIVERGED) and {UNDER_WAY_LABEL, DIVERGED_LABEL} <= set(legend(figure))
    assert settled.norm.vmax == grid[1].figure.axes[0].collections[0].norm.vmax and same_color(
        grid[1].collections[1].get_facecolor()[0], "0.85"
    )
    assert sum(len(c.lines[0].get_xdata()) for c in grid[2].containers) == 11
    assert of_gid(grid[1], "product label")


def test_further_axes_of_points_are_named():
    beta = {"beta_1": np.linspace(0.5, 0.9, 12), "schedule": ["constant", "cosine"] * 6}
    figure = sweep_figures(sweep(point=True, **cloud(), **beta))["sweep_adamw"]
    assert r"$\beta_1$ 0.5 to 0.9" in figure.get_suptitle() and "2 values of schedule" in figure.get_suptitle()


def test_points_along_one_axis_make_lines():
    random = np.random.default_rng(2)
    data = sweep(point=True, lr=10 ** random.uniform(-3, -1, 8), weight_decay=[0.1] * 8, schedule=["constant", "cosine"] * 4)
    figure = sweep_figures(data)["sweep_adamw"]
    line = panels(figure)[0].lines[0].get_xdata()
    assert len(line) == 4 and (np.diff(line) > 0).all()
    assert legend(figure)[:2] == ["schedule constant", "schedule cosine"] and "weight decay 0.1" in figure.get_suptitle()


def test_files_per_optimizer(tmp_path):
    data = sweep(("adamw", "my_rule.py:My Rule"), lr=[0.01, 0.1])
    before = plt.get_fignums()
    paths = save_sweep(data, tmp_path)
    assert [p.name for p in paths] == ["sweep_adamw.png", "sweep_my_rule.py-My-Rule.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths) and plt.get_fignums() == before


def test_axes_are_read_from_the_attribute_or_the_dataset():
    data = sweep(lr=[1e-3, 1e-2, 1e-1], momentum=[0.8, 0.85, 0.9], schedule=["b", "a"], axes="lr:linear,momentum:list,schedule:list")
    lr, momentum, schedule = read_axes(data.isel(optimizer=0))
    assert not lr.log and not momentum.log and schedule.values.tolist() == ["b", "a"] and not schedule.numeric
    del data.attrs["axes"]
    assert [(a.name, a.log) for a in read_axes(data.isel(optimizer=0))] == [("lr", True), ("momentum", False), ("schedule", False)]
    points = sweep(point=True, **cloud())
    del points.attrs["axes"]
    assert [a.name for a in read_axes(points.isel(optimizer=0))] == ["lr", "weight_decay"]


def degenerate():
    one = {"lr": [0.01], "weight_decay": [0.1]}
    yield "1x1", sweep(**one)
    yield "one row", sweep(lr=GRID["lr"], weight_decay=[0.1])
    yield "unsorted, integers, with zero", sweep(batch=[32, 16, 64], momentum=[0.0, 0.5, 0.9])
    yield "strings only", sweep(schedule=["constant", "cosine"])
    yield "replicates only", sweep(replicate=[0, 1, 2])
    yield "no axis", sweep()
    yield "many lines", sweep(lr=[0.1, 0.2], schedule=[f"s{i}" for i in range(11)])
    yield "one point", sweep(point=True, lr=[0.1], weight_decay=[0.1])
    yield "two points", sweep(point=True, lr=[0.1, 0.2], weight_decay=[0.1, 0.3])
    yield "points of strings", sweep(point=True, lr=[0.1, 0.1], schedule=["constant", "cosine"])
    for name, shape in (("grid", GRID), ("line", LINE), ("points", {"point": True, **cloud()})):
        flat = sweep(**shape)
        flat["norm"][:] = np.nan
        flat["rotation"][:] = flat["rotation_exact"][:] = 0.1
        flat["rms_update"][:] = flat["rms_update_exact"][:] = flat["rms_update_mcse"][:] = 0.0
        yield f"{name}: NaN, constant, zero, none settled", flat.assign(settled=flat["settled"] * 0)
        blind = sweep(**shape).drop_vars([f"{q}_paper" for q in QUANTITIES])
        blind["norm_exact"][:] = blind["rotation_exact"][:] = blind["rms_update_mcse"][:] = np.nan
        yield f"{name}: no paper, NaN predictions and error bars", blind
        log = sweep(**shape)[["norm", "rms_update"]]
        yield f"{name}: a log of two quantities", log
        yield f"{name}: nothing", sweep(**shape)[["settled"]]


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in degenerate()])
def test_degenerate_sweeps(data):
    for figure in sweep_figures(data).values():
        figure.draw_without_rendering()
        assert len(panels(figure)) in (4, 6, 9)


def test_what_was_not_measured_says_so(troubled):
    said = [[t.get_text() for t in axis.texts if t.get_text() == "not measured"] for axis in panels(troubled[1])]
    assert said == [[], [], [], ["not measured"], [], ["not measured"], [], [], []]


def test_no_prediction_means_no_contours():
    data = sweep(**GRID)
    del data["rotation_exact"]
    figure = sweep_figures(data)["sweep_adamw"]
    assert not any(contours(axis) for axis in panels(figure)) and CONTOUR_LABEL not in legend(figure)
    assert np.isnan(read_quantities(data.isel(optimizer=0))[1].error).all()


def trajectories(data):
    time = xarray.DataArray(np.arange(100, 3001, 100), dims="time", name="time")
    names = [q for q in QUANTITIES if q in data]
    traces = xarray.Dataset({q: data[f"{q}_exact"] * (1 + np.exp(-time / 500)) for q in names})
    return traces.transpose(..., "time").assign_coords(time=time)


@pytest.mark.parametrize("shape", [GRID, {"point": True, **cloud(30)}, {"lr": [0.1], "weight_decay": [0.1]}, {**LINE, "replicate": [0, 1]}])
def test_trajectories(shape, tmp_path):
    data = sweep(**shape)
    walks = data["norm"].size // (2 if "replicate" in shape else 1)
    figure = trajectory_figures(trajectories(data), data)["trajectories_adamw"]
    assert len(panels(figure)) == 3
    solid = [line for line in panels(figure)[1].lines if line.get_linestyle() == "-"]
    dashed = [line.get_ydata()[0] for line in panels(figure)[1].lines if line.get_linestyle() == "--"]
    assert len(solid) == len(dashed) == min(walks, 12)
    np.testing.assert_allclose([line.get_ydata()[-1] for line in solid], dashed, rtol=0.01)
    assert dashed == sorted(dashed) and legend(figure)[-1] == "exact equilibrium"
    assert (f"12 of {walks} walks" in figure.get_suptitle()) == (walks > 12)
    assert [p.name for p in save_trajectories(trajectories(data), data, tmp_path)] == ["trajectories_adamw.png"]


def test_trajectories_without_predictions_or_values():
    data = sweep(**GRID)
    traces = trajectories(data) * np.nan
    bare = data.drop_vars([f"{q}_exact" for q in QUANTITIES])
    for figure in trajectory_figures(traces.drop_vars("norm"), bare).values():
        figure.draw_without_rendering()


def test_pictures_of_a_sweep_need_no_validation():
    code = "import rwsim.plots, sys; assert not {'rwsim.validate', 'torch', 'xarray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_backend_that_a_notebook_names_stays():
    code = "import matplotlib, rwsim.plots; print(matplotlib.get_backend())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MPLBACKEND": "svg"}, capture_output=True, text=True, check=True)
    assert done.stdout == "svg\n"
