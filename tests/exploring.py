"""What tests of the explorer share: random settings of its sliders, and what rwsim says there."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import rwsim
from rwsim.explore.setting import LAW, NEURONS, hyper_controls, keys
from rwsim.optimizers import RULES
from rwsim.theory import symbols as sym
from rwsim.theory.factors import SHAPES, warmed_up
from rwsim.theory.predict import gradient_law
from rwsim.theory.schedule import closed_path
from rwsim.theory.transient import time_constants

QUANTITIES = ("norm", "rotation", "rms_update")


@dataclass(frozen=True)
class Point:
    """A setting of the page: an optimizer, its values by key (`loss_scale` among them), a law, a run."""

    name: str
    values: dict[str, float]
    fan_in: int
    batch: int
    steps: int
    warm: int
    shape: str
    start: float

    @property
    def hyper(self) -> dict[str, Any]:
        given = {k: v for k, v in self.values.items() if k != "loss_scale"}
        pair = tuple(given.pop(key) for key in ("betas_1", "betas_2") if key in given)
        return {**given, "betas": pair} if pair else given

    @property
    def rule(self) -> Any:
        return RULES[self.name](**self.hyper)

    @property
    def law(self) -> Any:
        return gradient_law(self.fan_in, self.batch, NEURONS, "uniform", self.values["loss_scale"])

    def asked(self) -> dict[str, Any]:
        """As the arguments of `Runtime.equilibrium` and `Runtime.path`."""
        at = {"fan_in": self.fan_in, "batch": self.batch, "loss_scale": self.values["loss_scale"], "neurons": NEURONS}
        run = {"steps": self.steps, "warm": self.warm, "shape": self.shape, "start": self.start}
        return {"name": self.name, "hyper": list(sym.flat(self.rule.values)), "at": at, **run}

    def predicted(self) -> dict[str, list[float]]:
        """Of `rwsim.predict`: paper and exact norm, rotation and RMS update; and the time constant."""
        found = rwsim.predict(
            self.name, fan_in=self.fan_in, batch=self.batch, neurons=NEURONS, loss_scale=self.values["loss_scale"], **self.hyper
        )
        assert found.paper is not None
        forms = {"paper": found.paper, "exact": found.exact}
        said = {form: [float(getattr(value, q)) for q in QUANTITIES] for form, value in forms.items()}
        return {**said, "time": [float(time_constants(RULES[self.name], [self.rule], found.exact)[0])]}

    def path(self, change: float = 0.0) -> np.ndarray:
        """Norm and rotation of `closed_path`, shape (2, step); `change`: relative size of random changes of each step's rate."""
        factors = warmed_up(self.shape, self.warm, self.steps) * (1 + change * np.random.default_rng(0).uniform(-1, 1, self.steps))
        return np.array(closed_path(self.rule, self.law, self.steps, {"lr": factors}, self.start**2 / self.fan_in))


def random_point(name: str, rng: np.random.Generator, steps: int) -> Point:
    """Anywhere on the sliders, whether it has an equilibrium or not."""

    def anywhere(control: Any) -> float:
        if control.scale == "near_one":
            return float(1 - (1 - control.high) ** rng.uniform())
        value = math.exp(rng.uniform(math.log(control.low), math.log(control.high)))
        return round(value) if control.whole else value

    controls = {control.key: control for control in (*hyper_controls(), *LAW)}
    values = {key: anywhere(controls[key]) for key in (*keys(RULES[name]), "loss_scale")}
    fan_in, batch = int(anywhere(controls["fan_in"])), int(anywhere(controls["batch"]))
    start = math.exp(rng.uniform(math.log(0.01), math.log(100.0)))
    return Point(name, values, fan_in, batch, steps, int(rng.integers(0, steps // 2)), str(rng.choice(SHAPES)), start)
