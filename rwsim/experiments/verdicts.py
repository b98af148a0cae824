"""What a study says: its claims, a paragraph made of their numbers, and the arms behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rwsim.experiments.compare import FAILED, HELD, UNDECIDED, Claim, overall
from rwsim.experiments.findings import csv_of, heading, json_of, markdown_of
from rwsim.experiments.study import Study, Trained

_SHOWN = ("subject", "claim", "rule", "verdict", "a - b", "±", "margin", "unit", "a", "b", "seeds", "note")
_ARMS = ("arm", "seeds", "diverged", "validation", "test")


@dataclass(frozen=True)
class Verdicts:
    """Claims, sentences, and arms with their means.

    Attributes:
        claims: As judged.
        says: The verdict's paragraph, then a sentence a claim.
        arms: Lines of `_ARMS`: final ones first.
    """

    claims: tuple[Claim, ...]
    says: tuple[str, ...]
    arms: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, study: Study, trained: Trained, claims: Sequence[Claim]) -> "Verdicts":
        """What claims and outcomes say."""
        count = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in (HELD, FAILED, UNDECIDED)}
        runs = [run for one in trained.runs.values() for run in one]
        lost = sum(run.diverged is not None for run in runs)
        searched = sum(not one.final for one in trained.arms.values())
        ended = f"{lost} diverged and count as guessing" if lost else "none diverged"
        steps = " or ".join(f"{n:,}" for n in sorted({one.recipe.steps for one in trained.arms.values()}))
        whole = overall(claim.verdict for claim in claims)
        first = (
            f"The claim that {study.claim}: **{whole}** here. Of {len(claims)} comparisons {count[HELD]} held, {count[FAILED]} "
            f"did not and {count[UNDECIDED]} are undecided (95 % intervals over seeds, paired). {len(runs)} runs of {len(trained.arms)} "
            f"configurations, {searched} of them a search on validation data, took {steps} steps each; {ended}. What differs from "
            f"the paper: it trained {study.paper}; {study.differs}."
        )
        edges = [f"{one.name} ({', '.join(said)})" for one in trained.select(final=True) if (said := trained.at_edge(one))]
        if edges:
            first += f" At the edge of what was searched, so that a wider search might do better: {'; '.join(edges)}."
        arms = sorted(trained.arms.values(), key=lambda one: not one.final)
        lines = []
        for one in arms:
            means = [_spread(trained.scores(one, test)) if test <= one.final else "-" for test in (False, True)]
            lines.append((one.name, str(one.seeds), str(trained.diverged(one) or "-"), *means))
        return cls(tuple(claims), (first, *(claim.sentence() for claim in claims)), tuple(lines))

    @property
    def passed(self) -> bool:
        """Whether every claim held."""
        return self.verdict == HELD

    @property
    def verdict(self) -> str:
        """Of all claims together."""
        return overall(claim.verdict for claim in self.claims)

    def table(self) -> str:
        """The claims as CSV."""
        return csv_of(Claim, self.claims)

    def to_json(self) -> dict[str, Any]:
        return {"claims": json_of(self.claims), "verdict": self.verdict, "says": list(self.says)}

    def markdown(self, name: str, settings: Mapping[str, Any]) -> str:
        """The summary: the paragraph, a sentence a claim, both tables."""
        first, *rest = self.says
        parts = [*heading(name, settings), first, "\n".join(f"- {say}" for say in rest), markdown_of(_SHOWN, map(_cells, self.claims))]
        parts.append("Configurations, mean ± standard deviation over seeds: points of accuracy, or minus the loss of a text in nats.")
        return "\n\n".join([*parts, markdown_of(_ARMS, self.arms)]) + "\n"

    def text(self) -> str:
        """For the terminal: the paragraph, a line a claim."""
        return "\n".join(say.replace("**", "") for say in self.says)


def _cells(claim: Claim) -> tuple[str, ...]:
    means = [f"{mean:.4g} ± {spread:.2g}" for mean, spread in ((claim.a, claim.a_spread), (claim.b, claim.b_spread))]
    margin = f"{claim.margin:g}" if claim.margin else "-"
    difference = [f"{claim.difference:+.3g}", f"{claim.interval:.2g}", margin, claim.unit or "-"]
    return (claim.subject, claim.claim, claim.rule, claim.verdict, *difference, *means, str(claim.seeds), claim.note or "-")


def _spread(values: Any) -> str:
    return f"{values.mean():.2f}" + (f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else "")
