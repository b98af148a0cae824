"""Paragraphs made of an experiment's numbers."""

import math
from collections.abc import Callable, Iterable, Sequence

from rwsim.experiments.case import Case, Config, Experiment
from rwsim.experiments.findings import INSIDE, OUTSIDE, SHOWN, UNDECIDED, Findings, Row, percent
from rwsim.experiments.judge import ROTATION
from rwsim.experiments.records import Records, Series


def verdict(experiment: Experiment, config: Config, rows: Sequence[Row]) -> str:
    """Whether the claim held, by how much, and what differs from the paper."""
    judged = [row for row in rows if row.verdict != SHOWN]
    count = {verdict: sum(row.verdict == verdict for row in judged) for verdict in (INSIDE, OUTSIDE, UNDECIDED)}
    held = "holds" if count[INSIDE] == len(judged) > 0 else "does not hold everywhere" if count[OUTSIDE] else "is undecided"
    networks = dict.fromkeys(
        f"{case.recipe.network} on {'bytes of a text' if case.recipe.text else 'Fashion-MNIST'} ({case.recipe.steps:,} steps)"
        for case in config.cases
    )
    products = dict.fromkeys(f"{case.recipe.hyper['lr'] * case.recipe.hyper['weight_decay']:.2g}" for case in config.cases)
    return (
        f"The claim that {experiment.claim} {held} here: of {len(judged)} judged quantities {count[INSIDE]} are inside their bands, "
        f"{count[OUTSIDE]} outside and {count[UNDECIDED]} undecided (the 95 % interval, over seeds and time, crosses a band's edge, or "
        f"there is no equilibrium in the run). What differs from the paper: it trained {experiment.paper}; here {', '.join(networks)}, "
        f"lr times decay {', '.join(products)}, {config.seeds} seeds."
    )


def setting(case: Case, series: Series) -> str:
    """What was trained, and how well it learned."""
    recipe = case.recipe
    hyper, size = (", ".join(f"{name} {value}" for name, value in given.items()) for given in (recipe.hyper, recipe.size))
    network = f"{recipe.network}{f' of {size}' if size else ''}{', standardized' if recipe.standardized else ''}"
    ran = f"{recipe.steps:,} steps of {recipe.batch}, schedule {recipe.schedule}, {len(series.seeds)} seeds"
    text = f"**{case.name}** ({network}; {recipe.optimizer}, {hyper}; {ran})."
    diverged = [f"seed {seed} at step {run['diverged']}" for seed, run in zip(series.seeds, series.runs, strict=True) if "diverged" in run]
    if diverged:
        text += f" Diverged: {', '.join(diverged)}; nothing is decided."
    ended = [run for run in series.runs if "accuracy" in run]
    if ended:
        losses = ", ".join(f"{run['held_out_loss']:.3f}" for run in ended)
        text += f" Held-out loss {losses}; accuracy {', '.join(format(run['accuracy'], '.1%') for run in ended)}."
    return text


def counted(rows: Sequence[Row], claim: str) -> str:
    """How many layers are inside, outside and undecided, which is furthest off, and what a correction explains."""
    if not rows:
        return ""
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (INSIDE, OUTSIDE, UNDECIDED)}
    said = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    text = f"{claim[0].upper()}{claim[1:]}: of {len(rows)} layers {said}"
    known = [row for row in rows if math.isfinite(row.error)]
    if known:
        mean = sum(abs(row.error) for row in known) / len(known)
        worst = max(known, key=lambda row: abs(row.error))
        text += f"; off by {percent(mean, '')} on average, at most {worst.layer}, {percent(worst.error)} ± {percent(worst.interval, '')}"
    rest = [row for row in known if row.verdict != INSIDE and math.isfinite(row.corrected)]
    if rest:
        mended = sum(abs(row.corrected) <= ROTATION for row in rest)
        text += f"; what was measured beside it brings {mended} of the {len(rest)} that are not inside within 3 %"
    return text + "."


def shown(rows: Sequence[Row]) -> str:
    """What became of layers that are not judged."""
    known = [row for row in rows if math.isfinite(row.error)]
    if not known:
        return ""
    near, mended = (sum(abs(value) <= ROTATION for value in values) for values in ([r.error for r in known], [r.corrected for r in known]))
    worst = max(known, key=lambda row: abs(row.error))
    return (
        f"Not scale-invariant, and not judged: {len(known)} layers; {near} rotate within 3 % of the prediction for those that are, "
        f"{mended} within 3 % of the corrected one; the furthest off is {worst.layer}, "
        f"{percent(worst.error)}."
    )


def analysed(
    config: Config, records: Records, rows_of: Callable[[Case, Series, int], Iterable[Row]], says_of: Callable[[list[Row]], Iterable[str]],
) -> Findings:  # fmt: skip
    """Rows of every case and layer, and a paragraph a case.

    Args:
        config: Its cases.
        records: What was measured of them.
        rows_of: Of a case, its series and the number of a layer.
        says_of: Sentences about a case's rows; empty ones are left out.
    """
    rows: list[Row] = []
    says: list[str] = []
    for case in config.cases:
        series = records[case.name]
        own = [row for k in range(len(series.layers)) for row in rows_of(case, series, k)]
        says.append(" ".join(filter(None, [setting(case, series), *says_of(own)])))
        rows += own
    return Findings(tuple(rows), tuple(says))
