"""What a sweep walks: the axes and their values, the designs that combine them, and the configuration that a file holds."""

import hashlib
import inspect
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from rwsim.config import MOST, MOST_STEPS, WalkSettings
from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES, UpdateRule, find_rule
from rwsim.theory.factors import schedule_factors

# More would be a slip of the pen: a GPU-week at the paper's steps.
MOST_POINTS = 1_000_000
# What an axis may be besides a hyperparameter, with the type of its values.
SETTINGS: dict[str, type] = {"loss_scale": float, "batch": int, "fan_in": int, "schedule": str}
_RANGE = "write it as LOW:HIGH:COUNT[:log], e.g. lr=1e-4:1e-1:20:log, or as a list, e.g. lr=1e-3,1e-2"


class SweepConfig(WalkSettings):
    """A sweep as a file or the command line gives it. Defaults are the paper's.

    Example:
        >>> config = SweepConfig.checked(optimizer=["adamw"], axes={"lr": "1e-3:1e-1:3:log", "weight_decay": [0.1, 1.0]})
        >>> len(Grid.of(config))
        6
    """

    model_config = ConfigDict(extra="forbid", frozen=True, title="rwsim sweep")

    optimizer: list[str] = Field(min_length=1, description="Names in rwsim.RULES, or FILE.py:RULE.")
    axes: dict[str, str | list[float | str]] = Field(
        min_length=1,
        description="Values by axis: LOW:HIGH:COUNT[:log] or a list. An axis is a hyperparameter of every optimizer (beta_1, beta_2 "
        "of a pair), or one of loss_scale, batch, fan_in, schedule.",
    )
    hyper: dict[str, float | list[float]] = Field({}, description="Fixed hyperparameters, given to every optimizer that takes them.")
    design: Literal["grid", "random", "latin"] = Field("grid", description="Every combination, or points drawn within the axes.")
    points: int | None = Field(None, ge=1, description="Points of a random or latin design.")
    replicates: int = Field(1, ge=1, description="Walks of each point, alike but for their random numbers.")
    layers: int = Field(1, ge=1, le=MOST, description="Independent copies of the layer that one point walks.")
    loss_scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="Factor on the output gradients.")
    window: int | None = Field(None, ge=1, le=MOST_STEPS, description="Steps per recorded window; by default a fortieth of the walk.")

    @property
    def window_steps(self) -> int:
        return self.window or math.ceil(self.steps / 40)

    @classmethod
    def read(cls, path: Path) -> "SweepConfig":
        """From a TOML file.

        Raises:
            InvalidArgument: A file that is not there or not TOML, a key or value that the schema does not know.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls.checked(**tomllib.loads(text))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InvalidArgument("grid", "must be a TOML file", str(path), f"{reason}; rwsim sweep --print-config shows one") from None

    def to_toml(self) -> str:
        """The whole configuration, ready for `read`."""
        tables: dict[str, Mapping[str, Any]] = {"axes": self.axes, "hyper": self.hyper}
        lines = []
        for name, value in self.model_dump(exclude=set(tables)).items():
            description = type(self).model_fields[name].description
            lines += [f"# {description}"] if description else []
            lines.append(f"{name} = {_toml(value)}" if value is not None else f"# {name} = ...")
        for name, table in tables.items():
            lines += ["", f"# {type(self).model_fields[name].description}", f"[{name}]"]
            lines += [f"{_toml(key)} = {_toml(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # JSON's strings, numbers and lists are TOML's too.
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Axis:
    """One swept quantity.

    Attributes:
        name: A hyperparameter (`beta_1` the first of the pair `betas`), or a key of `SETTINGS`, or ``replicate``.
        values: Of a grid, distinct.
        scale: ``"log"`` or ``"linear"``; of a list ``"list"``.
    """

    name: str
    values: tuple[Any, ...]
    scale: str

    @classmethod
    def parse(cls, name: str, text: str | Sequence[Any]) -> "Axis":
        """From LOW:HIGH:COUNT[:log] or a list.

        Raises:
            InvalidArgument: No such range, LOW not below HIGH, a log axis through 0, values that repeat.

        Example:
            >>> Axis.parse("lr", "1e-3:1e-1:3:log").values
            (0.001, 0.01, 0.1)
        """
        label = f"axes.{name}"
        kind = SETTINGS.get(name, float)
        if isinstance(text, str) and ":" in text and kind is not str:
            return cls._range(name, label, text, kind)
        items = [part.strip() for part in text.split(",")] if isinstance(text, str) else list(text)
        values = tuple(_value(label, item, kind) for item in items)
        if not values or len(set(values)) < len(values):
            raise InvalidArgument(label, "must hold distinct values" if values else "must not be empty", text, "for example 1e-3,1e-2")
        return cls(name, values, "list")

    @classmethod
    def _range(cls, name: str, label: str, text: str, kind: type) -> "Axis":
        low_text, high_text, *rest = text.split(":")
        low, high = (_value(label, part, float) for part in (low_text, high_text))
        scale = rest.pop() if rest and rest[-1] in ("log", "linear") else "linear"
        if len(rest) != 1 or not rest[0].isdecimal():
            raise InvalidArgument(label, "must be a range or a list", text, _RANGE)
        count = int(rest[0])
        if not low < high:
            raise InvalidArgument(label, "must have LOW below HIGH", text, _RANGE)
        if scale == "log" and low <= 0:
            raise InvalidArgument(label, "must lie above 0 on a log axis", text, "give a LOW above 0, or leave :log out")
        if not 2 <= count <= MOST_POINTS:
            raise InvalidArgument(label, f"must have a COUNT of 2 to {MOST_POINTS:,}", count, "one value is a list of one: lr=1e-3")
        # From decimal exponents, so that ends and whole powers come out as they are written.
        grid = np.logspace(math.log10(low), math.log10(high), count) if scale == "log" else np.linspace(low, high, count)
        numbers = [low, *(float(f"{x:.12g}") for x in grid[1:-1]), high]
        values = tuple(round(x) for x in numbers) if kind is int else tuple(numbers)
        if len(set(values)) < len(values):
            raise InvalidArgument(label, f"has fewer than {count} different values", text, "give a smaller COUNT")
        return cls(name, values, scale)

    def at(self, share: np.ndarray) -> list[Any]:
        """Values at shares in [0, 1) of the axis: of a range anywhere between its ends, of a list one of its values."""
        if self.scale == "list":
            return [self.values[int(u * len(self.values))] for u in share]
        low, high = self.values[0], self.values[-1]
        spread = np.exp(np.log(low) + share * np.log(high / low)) if self.scale == "log" else low + share * (high - low)
        kind = SETTINGS.get(self.name, float)
        return [round(x) if kind is int else float(x) for x in spread]


def _value(label: str, item: Any, kind: type) -> Any:
    if kind is str:
        schedule_factors(str(item), 2)
        return str(item)
    try:
        number = float(item)
    except (TypeError, ValueError):
        raise InvalidArgument(label, "must hold numbers", item, _RANGE) from None
    if not math.isfinite(number):
        raise InvalidArgument(label, "must hold finite numbers", item, "for example 1e-3,1e-2")
    if kind is int:
        if number != int(number):
            raise InvalidArgument(label, "must hold whole numbers", item, "for example 16,32")
        return int(number)
    return number


@dataclass(frozen=True)
class Setting:
    """What the points of one job share besides the optimizer's class: the layer's sizes and the schedule."""

    fan_in: int
    batch: int
    loss_scale: float
    schedule: str = "constant"


@dataclass(frozen=True)
class Point:
    """One walk of the sweep."""

    optimizer: str
    rule: UpdateRule
    setting: Setting
    replicate: int = 0


@dataclass(frozen=True)
class Grid:
    """The points of a sweep in their order, and the dimensions that they are laid out in.

    Attributes:
        config: Where they come from.
        axes: In the order given; ``replicate`` last where there are several.
        rows: Values of every axis, one row per point of an optimizer.
        rules: The class of each optimizer.
    """

    config: SweepConfig
    axes: tuple[Axis, ...]
    rows: tuple[tuple[Any, ...], ...]
    rules: tuple[type[UpdateRule], ...]

    @classmethod
    def of(cls, config: SweepConfig) -> "Grid":
        """Combine the axes.

        Raises:
            InvalidArgument: An axis that an optimizer does not take, or that is fixed as well; a value out of its range; too many
                points; a design without its number of points.
        """
        if len(set(config.optimizer)) < len(config.optimizer):
            raise InvalidArgument("optimizer", "must name each rule once", config.optimizer, "leave the second one out")
        rules = tuple(find_rule(name) for name in config.optimizer)
        axes = tuple(Axis.parse(name, text) for name, text in config.axes.items())
        for rule in rules:
            for axis in axes:
                cls._check_axis(axis, rule, config)
        for key, value in config.hyper.items():
            if not any(key in rule.hyper for rule in rules):
                known = sorted({name for rule in rules for name in rule.hyper})
                raise InvalidArgument(f"hyper.{key}", "is not a hyperparameter of any optimizer here", value, f"known: {', '.join(known)}")
        if (config.design == "grid") != (config.points is None):
            rule_text = "belongs to designs random and latin" if config.design == "grid" else f"must be given for design {config.design}"
            raise InvalidArgument("points", rule_text, config.points, "give --points with --design random or latin, and only there")
        count = config.points or math.prod(len(axis.values) for axis in axes)
        if (total := count * config.replicates * len(rules)) > MOST_POINTS:
            remedy = "take fewer values, or a random or latin design"
            raise InvalidArgument("axes", f"must make {MOST_POINTS:,} points at most", f"{total:,}", remedy)
        base: Iterator[tuple[Any, ...]]
        if config.points is None:
            base = itertools.product(*(axis.values for axis in axes))
        else:
            from scipy.stats import qmc  # a second to load

            rng = np.random.default_rng(config.seed)
            shape = (config.points, len(axes))
            shares = rng.random(shape) if config.design == "random" else qmc.LatinHypercube(len(axes), rng=rng).random(config.points)
            base = zip(*(axis.at(column) for axis, column in zip(axes, shares.T, strict=True)), strict=True)
        if config.replicates > 1:
            numbers = tuple(range(config.replicates))
            axes = (*axes, Axis("replicate", numbers, "list"))
            base = ((*row, number) for row in base for number in numbers)
        grid = cls(config, axes, tuple(base), rules)
        _ = grid.points  # every value is in its range, or this says which is not
        return grid

    @staticmethod
    def _check_axis(axis: Axis, rule: type[UpdateRule], config: SweepConfig) -> None:
        names = entries(rule)
        label = f"axes.{axis.name}"
        if axis.name not in names and axis.name not in SETTINGS:
            known = ", ".join((*names, *SETTINGS))
            pair = f"; {axis.name} is a pair: sweep its entries" if axis.name in rule.hyper else ""
            raise InvalidArgument(label, f"is not a hyperparameter of {rule.name} nor a setting", axis.name, f"known: {known}{pair}")
        if axis.name in config.hyper:
            raise InvalidArgument(label, "must not be fixed as well", config.hyper[axis.name], "drop one of the two")

    def __len__(self) -> int:
        return len(self.rows) * len(self.rules)

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions of the results with their lengths: optimizer, then the axes, or one for the points of a design."""
        first = {"optimizer": len(self.rules)}
        if self.config.points is None:
            return first | {axis.name: len(axis.values) for axis in self.axes}
        return first | {"point": len(self.rows)}

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Every point, the last axis fastest."""
        config, names = self.config, [axis.name for axis in self.axes]
        settings: dict[tuple[Any, ...], Setting] = {}
        columns = [i for i, name in enumerate(names) if name in SETTINGS]
        number = names.index("replicate") if "replicate" in names else None

        def setting(row: tuple[Any, ...]) -> Setting:
            key = tuple(row[i] for i in columns)
            if key not in settings:
                values = {name: getattr(config, name) for name in ("fan_in", "batch", "loss_scale")}
                values |= {names[i]: row[i] for i in columns}
                WalkSettings.checked(fan_in=values["fan_in"], batch=values["batch"])
                if not values["loss_scale"] > 0:
                    raise InvalidArgument("loss_scale", "must lie in (0, inf)", values["loss_scale"], "the default is 1")
                settings[key] = Setting(**values)
            return settings[key]

        points: list[Point] = []
        for name, rule in zip(config.optimizer, self.rules, strict=True):
            rules = rule.each(self._hyper(rule))
            points += [
                Point(name, each, setting(row), 0 if number is None else row[number]) for each, row in zip(rules, self.rows, strict=True)
            ]
        return tuple(points)

    def _hyper(self, rule: type[UpdateRule]) -> Iterator[dict[str, Any]]:
        """Hyperparameters of every row for one optimizer."""
        names = [axis.name for axis in self.axes]
        fixed: dict[str, Any] = {key: value for key, value in self.config.hyper.items() if key in rule.hyper}
        fixed = {key: tuple(value) if isinstance(value, list) else value for key, value in fixed.items()}
        swept = [(names.index(entry), key, place) for entry, (key, place) in entries(rule).items() if entry in names]
        for row in self.rows:
            hyper = dict(fixed)
            for column, key, place in swept:
                if place is None:
                    hyper[key] = row[column]
                else:
                    pair = hyper.get(key, rule.hyper[key])
                    hyper[key] = (*pair[:place], row[column], *pair[place + 1 :])
            yield hyper

    def keys(self, engine: str, device: str) -> tuple[str, ...]:
        """Of every point, the hash of everything that its numbers depend on, written as JSON with sorted keys."""
        config = self.config
        common = config.model_dump(include={"steps", "neurons", "gradient", "layers", "gamma", "seed"})
        start = f"[{_sorted(common)}, {_sorted(config.window_steps)}, ["
        rules: dict[type[UpdateRule], str] = {}
        for rule in self.rules:
            # A rule of the user's own is what its text says, whatever it is called.
            text = "" if RULES.get(rule.name) is rule else inspect.getsource(rule.update)
            rules[rule] = f"{start}{_sorted(rule.name)}, {_sorted(text)}, "
        names = {rule: [(key, f"{_sorted(key)}: ") for key in sorted(rule.hyper)] for rule in self.rules}
        # Only the hyperparameters' numbers differ from point to point: JSON proper would take most of a large sweep's start.
        settings = {setting: _sorted(vars(setting)) for setting in {point.setting for point in self.points}}
        end = f"], {_sorted(engine)}, {_sorted(device)}]"
        keys = []
        for point in self.points:
            kind, values = type(point.rule), vars(point.rule.values)
            hyper = ", ".join([label + _number(values[key]) for key, label in names[kind]])
            text = f"{rules[kind]}{{{hyper}}}, {settings[point.setting]}, {point.replicate}{end}"
            keys.append(hashlib.sha256(text.encode()).hexdigest())
        return tuple(keys)


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _number(value: float | tuple[float, ...]) -> str:
    """As JSON has it."""
    return f"[{', '.join(map(float.__repr__, value))}]" if isinstance(value, tuple) else float.__repr__(value)


def entries(rule: type[UpdateRule]) -> dict[str, tuple[str, int | None]]:
    """Names of a rule's single numbers: of a pair's entries ``beta_1``, ``beta_2``; with the hyperparameter and the place in it.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> list(entries(AdamW))
        ['lr', 'weight_decay', 'beta_1', 'beta_2', 'eps']
    """
    names: dict[str, tuple[str, int | None]] = {}
    for key, default in rule.hyper.items():
        if isinstance(default, tuple):
            names |= {f"{key.removesuffix('s')}_{i + 1}": (key, i) for i in range(len(default))}
        else:
            names[key] = (key, None)
    return names
