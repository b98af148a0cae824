"""The accuracy study: what `python -m benchmarks.accuracy` measured, and with --errors what each prediction is off by."""

from typing import Any

import numpy as np

from rwsim.page.html import Html, join
from rwsim.page.scale import percent
from rwsim.page.table import Column, table
from rwsim.report.draw import distribution
from rwsim.report.read import Array, Columns, File
from rwsim.report.sheet import Sheet, figures, note, num, pct, plural
from rwsim.report.words import FORMS, QUANTITIES, called, heading

NAME = "accuracy study"
NAMES: tuple[str, ...] = ()
WRITES = "the CSV of benchmarks.accuracy (--errors)"
_MEASURED = ("optimizer", "number", "rate", "lr", "weight_decay", "beta_1", "beta_2", "eps", "fan_in", "batch", "gamma", "loss_scale")
SHOWN = 200


def is_mine(file: File) -> bool:
    """Whether a file is of the accuracy study."""
    return file.form == "csv" and set(file.header) >= {*_MEASURED, *QUANTITIES}


def sheet(file: File) -> Sheet:
    """A report of it."""
    columns = file.csv
    if not columns.rows:
        raise file.damaged("it holds no point")
    optimizers = list(dict.fromkeys(columns.text("optimizer").tolist()))
    judged = "full_norm" in columns
    sections: list[tuple[str, Any]]
    if judged:
        sections = [("How far off", join(_distributions(columns, optimizers), _off(columns, optimizers)))]
        verdict, summary = _said(columns)
    else:
        verdict = f"{plural(columns.rows, 'point')} measured; this file holds no prediction."
        summary = [
            "--errors FILE of the comparison writes a file that holds every prediction's error too; a report of that one shows them."
        ]
        sections = []
    sections.append(("Points", _points(columns, judged)))
    return Sheet(
        title=f"Accuracy of the predictions: {', '.join(optimizers)}",
        tone="",
        verdict=verdict,
        summary=summary,
        sections=sections,
        facts=[
            ("Date", file.date), ("rwsim", None), ("Device", None),
            ("Seed of the design", f"{int(columns.numbers('number').min()) // 1000}"),
            ("Design", f"scrambled Latin hypercube, {plural(columns.rows, 'point')}"), ("Read from", file.name),
        ],
        command=_command(columns, judged),
        remark="From a checkout of rwsim: the study is no part of the package.",
    )  # fmt: skip


def _command(columns: Columns, judged: bool) -> str:
    seed = int(columns.numbers("number").min()) // 1000
    chosen = f" --seed {seed}" if seed else ""
    return f"python -m benchmarks.accuracy walk --device cuda{chosen}" + (
        f"\npython -m benchmarks.accuracy{chosen} --errors errors.csv" if judged else ""
    )


def _valid(columns: Columns) -> Array:
    return np.isin(columns.text("valid"), ("True", "true", "1"))


def _said(columns: Columns) -> tuple[str, list[str]]:
    valid = _valid(columns)
    parts, beside = [], []
    for quantity in ("norm", "rotation"):
        off = [np.abs(columns.numbers(f"{form}_{quantity}")) for form, _ in FORMS]
        parts.append(f"{percent(_quantile(off[0][valid], 0.95), sign=False)} in {called(quantity)}")
        full, exact, paper = (percent(_quantile(one, 0.5), sign=False) for one in off)
        beside.append(
            f"{heading(quantity)}: half of all points are within {full} of the full, {exact} of the exact, {paper} of the paper's form."
        )
    share = f"{valid.mean():.0%}".replace("%", " %")
    verdict = f"Where the full prediction stands by itself ({share} of {columns.rows:,} points), 95 % are within {' and '.join(parts)}."
    return verdict, [" ".join(beside)]


def _off(columns: Columns, optimizers: list[str]) -> Html:
    heads = [
        Column("optimizer"),
        Column("quantity"),
        Column("prediction"),
        *(Column(x, "number") for x in ("points", "median", "95 %", "largest")),
    ]
    heads += [Column("valid, 95 %", "number"), Column("valid, largest", "number")]
    own, valid = columns.text("optimizer"), _valid(columns)
    rows = []
    for optimizer in [*optimizers, "all"]:
        mine = (own == optimizer) | (optimizer == "all")
        for quantity in QUANTITIES:
            for form, said in FORMS:
                off = np.abs(columns.numbers(f"{form}_{quantity}"))
                cells = [pct(_quantile(off[mine], q), sign=False) for q in (0.5, 0.95, 1.0)]
                cells += [pct(_quantile(off[mine & valid], q), sign=False) for q in (0.95, 1.0)]
                rows.append([optimizer, called(quantity), said, num(int(np.isfinite(off[mine]).sum())), *cells])
    caption = "Absolute relative error, measured over predicted; valid: points that the full prediction stands by"
    return table("off", caption, heads, rows)


def _quantile(values: Array, q: float) -> float | None:
    some = values[np.isfinite(values)]
    return float(np.quantile(some, q)) if len(some) else None


def _distributions(columns: Columns, optimizers: list[str]) -> Html:
    own = columns.text("optimizer")
    drawn: list[Html] = []
    for optimizer in optimizers:
        mine = own == optimizer
        for quantity in ("norm", "rotation"):
            errors = [(said, form, columns.numbers(f"{form}_{quantity}")[mine]) for form, said in FORMS]
            drawn.append(distribution(f"share-{len(drawn)}", f"{optimizer}: {called(quantity)}", errors))
    return figures(*drawn)


def _points(columns: Columns, judged: bool) -> Html:
    """The points, those first that the full prediction is furthest off."""
    total = columns.rows
    off = np.zeros(total)
    if judged:
        off = np.nan_to_num(np.max([np.abs(columns.numbers(f"full_{q}")) for q in ("norm", "rotation")], axis=0), nan=-1.0)
    order = np.argsort(-off, kind="stable")[:SHOWN]
    settings = ("rate", "lr", "weight_decay", "beta_1", "beta_2", "fan_in", "batch", "loss_scale")
    heads = [
        Column("point", "number"),
        Column("optimizer"),
        *(Column(name.replace("_", " "), "number") for name in settings),
        Column("gamma"),
    ]
    heads += [Column(called(q), "number") for q in QUANTITIES]
    heads += [Column(f"{called(q)}, {form} error", "number") for q in ("norm", "rotation") for form, _ in FORMS] if judged else []
    heads += [Column("valid")] if judged else []
    numbers = {name: columns.numbers(name) for name in ("number", *settings, *QUANTITIES)}
    errors = [columns.numbers(f"{form}_{q}") for q in ("norm", "rotation") for form, _ in FORMS] if judged else []
    text, gamma = columns.text("optimizer"), columns.text("gamma")
    valid = _valid(columns) if judged else None
    rows = []
    for i in order.tolist():
        row: list[Any] = [num(int(numbers["number"][i])), text[i], *(num(float(numbers[name][i])) for name in settings), gamma[i]]
        row += [num(float(numbers[q][i])) for q in QUANTITIES] + [pct(float(error[i])) for error in errors]
        rows.append([*row, *([] if valid is None else ["yes" if valid[i] else "no"])])
    left = total - len(order)
    first = "those that the full prediction is furthest off first" if judged else "in the order of the file"
    rest = note(f"{plural(left, 'point')} are left out of this table; {columns.file} has them all.") if left else None
    return join(table("points", f"{plural(len(order), 'point')} of {total:,}, {first}", heads, rows), rest)
