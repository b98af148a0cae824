"""The experiments and studies themselves, by name."""

from importlib import import_module
from typing import Any

from rwsim.experiments import EXPERIMENT_NAMES, STUDY_NAMES
from rwsim.experiments.case import Experiment
from rwsim.experiments.study import Study


def _named(name: str) -> Any:
    module = name.replace("-", "_")
    return getattr(import_module(f"rwsim.experiments.{module}"), module.upper())


EXPERIMENTS: dict[str, Experiment] = {name: _named(name) for name in EXPERIMENT_NAMES}
STUDIES: dict[str, Study] = {name: _named(name) for name in STUDY_NAMES}
