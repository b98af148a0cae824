"""What an experiment is made of: cases that are trained with several seeds, at a size, and an analysis of what was measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rwsim.experiments.train import Recipe

if TYPE_CHECKING:
    from rwsim.experiments.findings import Findings
    from rwsim.experiments.records import Records


@dataclass(frozen=True)
class Case:
    """A recipe under a name, which files and tables bear."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Config:
    """An experiment at one size.

    Attributes:
        cases: Trained with every seed.
        seeds: How many.
    """

    cases: tuple[Case, ...]
    seeds: int = 3


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper.

    Attributes:
        name: On the command line.
        about: One line.
        claim: What is judged, as a clause.
        paper: What the paper trained.
        configs: By size: ``gpu`` (minutes on a large GPU), ``cpu`` (minutes on two cores), ``smoke`` (seconds; decides nothing).
        analyse: From what was measured to what it says.
    """

    name: str
    about: str
    claim: str
    paper: str
    configs: Mapping[str, Config]
    analyse: "Callable[[Config, Records], Findings]"
