"""A small result of every command that rwsim reports, as the commands write it; and the hostile ones.

python -m tests.report_samples     # writes tests/results anew (half a minute)
"""

import csv
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
# Ends an attribute, makes an element, runs.
HOSTILE = "\"'><img src=x onerror=alert(1)><script>alert(1)</script>"


def validate(place: Path) -> Path:
    """Small and undecided, figure and walk included."""
    from rwsim.cli import run

    out = place / "validate"
    options = ["--optimizer", "adamw", "--lr", "0.02", "--weight-decay", "2", "--steps", "300", "--neurons", "8", "--fan-in", "16"]
    assert run(["validate", *options, "--out", str(out), "--quiet"]) == 1
    return out


def sweep(place: Path) -> Path:
    from rwsim.cli import run

    out = place / "sweep"
    options = ["--optimizer", "adamw", "--axis", "lr=1e-3:1e-1:4:log", "--axis", "weight_decay=0.5:5:3:log", "--neurons", "4"]
    assert run(["sweep", *options, "--fan-in", "16", "--steps", "400", "--out", str(out), "--csv", "--quiet"]) == 0
    return out


def many_points(place: Path, side: int = 100) -> Path:
    """A sweep of side x side points as `rwsim sweep` writes it; what was measured is made up, a percent or so off Table 1."""
    from rwsim.sweeps.grid import Grid, SweepConfig
    from rwsim.sweeps.result import dataset, provenance, write_netcdf

    axes: dict[str, Any] = {"lr": f"1e-4:1e-1:{side}:log", "weight_decay": f"1e-2:10:{side}:log"}
    grid = Grid.of(SweepConfig.checked(optimizer=["adamw"], axes=axes, seed=7))
    lr, decay = (np.array([getattr(point.rule.values, name) for point in grid.points]) for name in ("lr", "weight_decay"))
    rng = np.random.default_rng(0)
    shape = {"norm": np.sqrt(64 * lr / decay), "rotation": np.sqrt(2 * lr * decay), "rms_update": np.sqrt(128) * lr}
    variables: dict[str, np.ndarray] = {}
    for name, values in shape.items():
        measured = values * (1 + 0.01 * rng.standard_normal(len(lr)))
        variables |= {name: measured, f"{name}_mcse": 0.005 * values, f"{name}_exact": values, f"{name}_paper": values * 1.02}
    settled = (lr * decay > 1e-4).astype(np.int8)
    rest = {"time_constant": 1 / (lr * decay), "burn_in": np.full(len(lr), 500, np.int32), "diverged": np.zeros(len(lr), np.int32)}
    out = place / "many-points"
    out.mkdir()
    write_netcdf(dataset(grid, {**variables, **rest, "settled": settled}, provenance(grid, "blocked", "cpu")), out / "sweep.nc")
    return out


def accuracy(place: Path) -> Path:
    """Four points of the real study, judged."""
    from benchmarks.accuracy import CORRECTIONS, judge, measured, write_errors

    cases = measured(ROOT / "benchmarks" / "accuracy.csv")[:200:50]
    out = place / "accuracy"
    out.mkdir()
    write_errors(cases, [judge((*case, CORRECTIONS)) for case in cases], out / "errors.csv")
    return out


def audit(place: Path) -> Path:
    """What `rwsim audit --json` writes of an optimizer that decays twice."""
    from rwsim.audit.finding import Finding, Outcome, Report

    quantities = {
        name: {"measured": 0.7 * value, "mcse": 0.001 * value, "predicted": value, "ratio": 0.7, "z": -300.0, "smallest_effect": 0.01}
        for name, value in {"norm": 0.7, "rotation": 0.03, "rms_update": 0.02}.items()
    }
    report = Report(
        "my_optimizers.py:MyAdamW", "adamw", "a variant of adamw: weight decay applied twice",
        (
            Finding("decay-twice", "fault", "high", "Weight decay applied twice.", ("P1", "P6"), 0.89, 1e-13, "print('decay < twice')\n"),
            Finding("load-aliases-state", "note", "low", "load_state_dict keeps the tensors.", ("P8",)),
        ),
        (
            Outcome("P1", "departed", measured={"one step": "departs"}),
            Outcome("P6", "departed", measured={"quantities": quantities, "steps": 2048}),
            Outcome("P9", "held"), Outcome("P8", "not applicable", "it has no state"),
        ),
        {"seed": 3, "settings": {"betas": [0.9, 0.97]}, "compiled": False, "rwsim": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    )  # fmt: skip
    out = place / "audit"
    out.mkdir()
    (out / "audit.json").write_text(report.to_json())
    return out


def experiment(place: Path) -> Path:
    """The real one that the documentation holds."""
    return ROOT / "docs" / "experiments" / "assumptions"


def plan(place: Path) -> Path:
    from rwsim.cli import run

    out = place / "plan"
    options = ["--lr", "8e-3", "--weight-decay", "0.06", "--steps", "2000", "--schedule", "cosine", "--warmup", "50"]
    assert run(["plan", "--optimizer", "adamw", *options, "--out", str(out), "--quiet"]) == 0
    return out


def probe(place: Path) -> Path:
    """Records of a probe on a small training, as CSV; `netcdf_of_probe` has the other form."""
    import torch

    import rwsim
    from rwsim.probe.writers import CSVWriter

    out = place / "probe"
    out.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(6, 12, generator=generator)) for _ in range(2)]
    model = torch.nn.Module()
    for i, weight in enumerate(weights):
        model.register_parameter(f"layer{i}", weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.5)
    with rwsim.DynamicsProbe(model, optimizer, every=2, writers=CSVWriter(out / "dynamics.csv")) as watch:
        for _ in range(60):
            for weight in weights:
                weight.grad = torch.randn(6, 12, generator=generator)
            optimizer.step()
    watch.to_netcdf(out.with_name("dynamics.nc"))
    return out


SAMPLES: dict[str, Callable[[Path], Path]] = {
    "validate": validate, "sweep": sweep, "accuracy": accuracy, "audit": audit, "experiment": experiment, "probe": probe, "plan": plan,
}  # fmt: skip


def kept() -> dict[str, Path]:
    """The results in the repository: to make them takes longer than to test with them. A slow test makes them anew."""
    return {kind: experiment(RESULTS) if kind == "experiment" else RESULTS / kind for kind in SAMPLES}


def shorter(source: Path, place: Path) -> Path:
    """An experiment with the first and the last rows of its table."""
    for name in ("settings.json", "summary.md"):
        shutil.copy(source / name, place)
    lines = (source / "table.csv").read_text().splitlines(keepends=True)
    (place / "table.csv").write_text("".join([*lines[:25], *lines[-10:]]))
    with gzip.open(source / "records.csv.gz", "rt") as old, gzip.open(place / "records.csv.gz", "wt") as new:
        new.writelines(line for i, line in enumerate(old) if i == 0 or i % 400 < 20)
    return place


def poison_json(value: Any, keep: frozenset[str]) -> Any:
    """Every string a hostile one, except what a key of `keep` holds."""
    if isinstance(value, dict):
        return {k: v if k in keep else poison_json(v, keep) for k, v in value.items()}
    if isinstance(value, list):
        return [poison_json(one, keep) for one in value]
    return HOSTILE if isinstance(value, str) else value


def poison_csv(source: Path, target: Path, columns: tuple[str, ...]) -> None:
    """These columns hostile in every line."""
    with source.open(newline="", encoding="utf-8") as old, target.open("w", newline="", encoding="utf-8") as new:
        lines = csv.DictReader(old)
        out = csv.DictWriter(new, lines.fieldnames or [], lineterminator="\n")
        out.writeheader()
        out.writerows(line | dict.fromkeys(columns, HOSTILE) for line in lines)


def hostile(samples: dict[str, Path], place: Path) -> dict[str, Path]:
    """Of every kind one whose text is hostile wherever text may stand."""
    import xarray as xr

    place.mkdir()
    found = {}
    for kind, name in (("validate", "validation.json"), ("audit", "audit.json"), ("plan", "plan.json")):
        values = json.loads((samples[kind] / name).read_text())
        found[kind] = place / f"{kind}.json"
        found[kind].write_text(json.dumps(poison_json(values, frozenset({"quantity", "status"} if kind == "validate" else ()))))
    found["sweep"] = place / "sweep.nc"
    with xr.open_dataset(samples["sweep"] / "sweep.nc", engine="scipy") as data:
        bad = data.load().assign_coords(optimizer=[HOSTILE])
        kept = {name: data.attrs[name] for name in ("title", "axes")}
        bad.attrs = {name: HOSTILE if isinstance(value, str) else value for name, value in data.attrs.items()} | kept
        bad.attrs["configuration"] = json.dumps(
            {"optimizer": [HOSTILE], "axes": {HOSTILE: HOSTILE}, "hyper": {HOSTILE: HOSTILE}, "seed": HOSTILE}
        )
        bad.to_netcdf(found["sweep"], engine="scipy", format="NETCDF3_64BIT")
    for kind, source, columns in (
        ("accuracy", samples["accuracy"] / "errors.csv", ("optimizer", "gamma")), ("probe", samples["probe"] / "dynamics.csv", ("layer",)),
    ):  # fmt: skip
        found[kind] = place / f"{kind}.csv"
        poison_csv(source, found[kind], columns)
    found["experiment"] = place / "experiment"
    found["experiment"].mkdir()
    values = json.loads((samples["experiment"] / "settings.json").read_text())
    (found["experiment"] / "settings.json").write_text(json.dumps(poison_json(values, frozenset())))
    poison_csv(samples["experiment"] / "table.csv", found["experiment"] / "table.csv", ("case", "layer", "note"))
    (found["experiment"] / "summary.md").write_text(f"# x\n\n{HOSTILE}\n\n**{HOSTILE}** [a](javascript:alert(1)) <b>c</b>\n")
    return found


def main() -> None:
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir()
    for make in SAMPLES.values():
        make(RESULTS)
    for picture in (*RESULTS.rglob("*.png"), *RESULTS.rglob("ledger.sqlite*")):
        picture.unlink()


if __name__ == "__main__":
    main()
