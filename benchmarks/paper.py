"""Every experiment of the paper beside what was found here: the table of docs/training.md, made from the results under docs/experiments.

    python -m benchmarks.paper

It writes the table into that page. Verdicts are those of `rwsim.experiments`: of a study its claims' about the part of it that the row is
of, of the experiments on norm and rotation whether layers are inside their bands.
"""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rwsim.experiments.compare import FAILED, HELD, UNDECIDED, Claim, overall
from rwsim.experiments.findings import INSIDE, OUTSIDE, SHOWN

DOCS = Path(__file__).parent.parent / "docs"
PAGE, RESULTS = DOCS / "training.md", DOCS / "experiments"
_OPENS, _CLOSES = "<!-- paper -->\n", "<!-- /paper -->\n"


@dataclass(frozen=True)
class Row:
    """An experiment of the paper.

    Attributes:
        place: In the paper.
        claim: What it says there.
        name: Of the experiment here; a command where it is none.
        part: What the subjects (of an experiment: cases) of its rows begin with.
        lead: Words of the claim that is quoted; empty: the first.
    """

    place: str
    claim: str
    name: str
    part: str = ""
    lead: str = ""


ROWS = (
    Row("Figure 3, ResNet-50", "norm and rotation go to the prediction (SGDM)", "dynamics", "resnet-sgdm"),
    Row("Figure 3, GPT2-124M standardized", "norm and rotation go to the prediction (AdamW)", "dynamics", "gpt-ws-adamw"),
    Row("Table 2, images", "a rotational variant (RV) recovers AdamW", "constrain", "images, AdamW", "few-shot recovers"),
    Row("Table 2, text", "an RV recovers AdamW", "constrain", "text, AdamW", "few-shot recovers"),
    Row("Figure 4 left", "along lr times decay = const lr acts through gains and biases", "tradeoff", "images"),
    Row("Figure 4 middle, right", "norm and rotation follow the schedule out of equilibrium", "transients"),
    Row("Figure 5 left, middle", "AdamW needs warmup, its RV does not (GPT)", "warmup", "text", "warmup helps the baseline"),
    Row("Figure 5 right; J, ResNet-50 curves", "SGDM needs warmup, its RV does not", "warmup", "images", "warmup helps the baseline"),
    Row("Figure 6", "AdamW is better than Adam+l2, whose layers turn unevenly", "adam"),
    Row("Figure 7", "weight standardization and RVs balance neurons and help", "standardize"),
    Row("F, random walks", "Table 1 describes random walks", "`rwsim validate`"),
    Row("G, CIFAR-10", "what departs from a random walk, and by how much", "assumptions"),
    Row("H, VGG-13", "lambda_e predicts scale-sensitive weights", "scale-sensitive", "unnormalized"),
    Row("J, no decay", "without decay rotation falls (the paper: exponentially)", "nodecay", "", "rather than exponentially"),
    Row("J, GPT2-124M unchanged", "close to the prediction without scale-invariance", "dynamics", "gpt-adamw"),
    Row("J, SGDM", "an RV recovers SGDM", "constrain", "images, SGDM", "few-shot recovers"),
    Row("J, Lion", "an RV recovers Lion", "constrain", "images, Lion", "few-shot recovers"),
    Row("J, lr against decay of a GPT", "an RV depends less on lr", "tradeoff", "text", "loses less"),
    Row("J, balancing Adam+l2", "Adam+l2's direction at AdamW's rate does as well", "adam", "", "at AdamW's rate"),
    Row("J, imbalanced rotation", "the more uneven, the worse", "imbalance", "", "balanced above half of the neurons at a factor of 10"),
    Row("J, sensitivity", "decay factor, centering, granularity matter little", "sensitivity"),
)  # fmt: skip
_HEADS = ("in the paper", "claim", "here", "verdict", "found")


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(_OPENS)
    return f"{before}{_OPENS}\n{table()}\n{_CLOSES}{rest.split(_CLOSES)[1]}"


def table(results: Path = RESULTS) -> str:
    """The table as Markdown.

    Args:
        results: Directory of a directory for each experiment.
    """
    lines = [f"| {' | '.join(_HEADS)} |", "|---" * len(_HEADS) + "|"]
    for row in ROWS:
        there = (results / row.name / "table.csv").is_file()
        here = f"[{row.name}](experiments/{row.name}/summary.md)" if there else row.name
        verdict, found = _read(row, results / row.name / "table.csv") if there else _missing(row)
        lines.append(f"| {row.place} | {row.claim} | {here} | {verdict} | {found} |")
    return "\n".join(lines) + "\n"


def _missing(row: Row) -> tuple[str, str]:
    if row.name.startswith("`"):
        return "see README", "each measurement beside Table 1, the exact and the full prediction"
    return "not run yet", "-"


def _read(row: Row, path: Path) -> tuple[str, str]:
    with path.open(newline="") as lines:
        told = list(csv.DictReader(lines))
    return _claims(row, told) if "claim" in told[0] else _layers(row, told)


def _claims(row: Row, told: Sequence[dict[str, str]]) -> tuple[str, str]:
    claims = [_claim(one) for one in told if one["subject"].startswith(row.part)]
    first = next(one for one in claims if row.lead in one.claim)
    count = sum(one.verdict == HELD for one in claims)
    verdict = overall(one.verdict for one in claims)
    held = "" if verdict in (HELD, FAILED) and len(claims) == 1 else f" ({count} of {len(claims)} claims held)"
    return f"**{verdict}**{held}", first.sentence().replace("**", "")


def _claim(told: dict[str, str]) -> Claim:
    text = ("subject", "claim", "rule", "verdict", "unit", "note")
    numbers = {key: float(value) if value else float("nan") for key, value in told.items() if key not in (*text, "seeds")}
    return Claim(**{key: told[key] for key in text}, **numbers, seeds=int(told["seeds"]))  # type: ignore[arg-type]  # by name


def _layers(row: Row, told: Sequence[dict[str, str]]) -> tuple[str, str]:
    own = [one for one in told if one["case"].startswith(row.part)]
    rotations = [abs(float(one["error"])) for one in own if one["quantity"] in ("rotation", "rotation, lambda_e") and one["error"]]
    judged = [one["verdict"] for one in own if one["verdict"] != SHOWN]
    inside, outside = judged.count(INSIDE), judged.count(OUTSIDE)
    verdict = overall({INSIDE: HELD, OUTSIDE: FAILED}.get(one, UNDECIDED) for one in judged)
    said = f"{inside} of {len(judged)} judged quantities inside their bands, {outside} outside"
    if not judged:
        verdict, said = "not judged", "layers that are not scale-invariant"
    if rotations:
        middle = statistics.median(rotations)
        said += f"; rotation off by {middle:.1%} in the median, {max(rotations):.1%} at most, over {len(rotations)} layers"
    return f"**{verdict}**", said


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
