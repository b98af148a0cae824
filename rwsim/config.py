"""Configuration: the settings of a walk and of a validation, and the cases that a validation judges."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rwsim.errors import InvalidArgument
from rwsim.optimizers import UpdateRule, find_rule

# The paper's settings: CIFAR-10 ResNet-20 for SGDM and Lion, ResNet-18 for AdamW and Adam+l2 (appendix F). Adam+l2 runs
# at loss scale 0.1: at 1 its slow coordinates have not settled after 15,000 steps.
PAPER_CASES: tuple[tuple[str, float, Mapping[str, Any]], ...] = (
    ("sgdm", 1.0, MappingProxyType({"lr": 0.5, "weight_decay": 1e-4, "momentum": 0.9})),
    ("adamw", 1.0, MappingProxyType({"lr": 1.25e-2, "weight_decay": 8e-2, "betas": (0.9, 0.999)})),
    ("adam_l2", 0.1, MappingProxyType({"lr": 7.813e-4, "weight_decay": 1.25e-4, "betas": (0.9, 0.999)})),
    ("lion", 1.0, MappingProxyType({"lr": 5e-4, "weight_decay": 1.0, "betas": (0.9, 0.999)})),
    ("lion", 1.0, MappingProxyType({"lr": 5e-4, "weight_decay": 1.0, "betas": (0.9, 0.99)})),
)


# More of anything is a slip of the keyboard, and would end in the middle of the work.
MOST_STEPS, MOST = 10**9, 10**7


def first_problem(error: ValidationError, model: type[BaseModel]) -> InvalidArgument:
    """The first of pydantic's complaints about a model's values, as ours."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    if field is None:
        remedy = f"known: {', '.join(model.model_fields)}" if first["type"] == "extra_forbidden" else ""
    else:
        known = not field.is_required() and field.default is not None and not field.default_factory
        remedy = f"the default is {field.default}" if known else "" if field.is_required() else "leave it out for the default"
    return InvalidArgument(".".join(map(str, first["loc"])), f"must be {message}", first["input"], remedy)


_Settings = TypeVar("_Settings", bound="WalkSettings")


class WalkSettings(BaseModel):
    """Settings of a walk; the defaults are the paper's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(15_000, ge=1, le=MOST_STEPS)
    neurons: int = Field(128, ge=1, le=MOST)
    fan_in: int = Field(128, ge=2, le=MOST)
    batch: int = Field(32, ge=4, le=MOST)
    gradient: Literal["marginal", "faithful", "gaussian"] = "marginal"
    gamma: Literal["normal", "uniform"] = "normal"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Literal["auto", "reference", "blocked", "fused"] = "auto"
    seed: int = Field(0, ge=0)

    @classmethod
    def checked(cls: type[_Settings], **values: Any) -> _Settings:
        """Like the constructor, but the first problem is raised as an `InvalidArgument`."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise first_problem(error, cls) from None


class Settings(WalkSettings):
    """Settings of a validation."""

    layers: int | None = Field(None, ge=1, le=MOST)
    loss_scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    margin: float = Field(0.01, gt=0, lt=1)
    window: int = Field(100, ge=1)


def choose_cases(optimizers: Sequence[str | type[UpdateRule]], hyper: Mapping[str, Any]) -> list[tuple[UpdateRule, float]]:
    """(rule, loss scale) of every case; given hyperparameters replace the paper's, key by key."""
    if not optimizers and not hyper:
        return [(find_rule(name)(**values), scale) for name, scale, values in PAPER_CASES]
    if hyper and len(optimizers) != 1:
        name = next(iter(hyper))
        raise InvalidArgument(name, "needs exactly one optimizer", hyper[name], "name it with --optimizer")
    cases = []
    for rule in map(find_rule, optimizers):
        published = [(scale, values) for name, scale, values in PAPER_CASES if name == rule.name]
        if hyper or not published:
            scale, values = published[0] if published else (1.0, {})
            cases.append((rule(**{**values, **hyper}), scale))
        else:
            cases.extend((rule(**values), scale) for scale, values in published)
    return cases
