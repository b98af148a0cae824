"""`rwsim plan`."""

import json
import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from rwsim.cli.shared import HOLDS, OUTPUT, check_place, whole
from rwsim.errors import InvalidArgument

if TYPE_CHECKING:
    from rwsim.plan import LayerPlan

_PEAK = Group("Hyperparameters (at the schedule's peak)", sort_key=2)


def plan(
    file: Path | None = None,
    /,
    *,
    optimizer: str | None = None,
    steps: Annotated[int | None, Parameter(converter=whole)] = None,
    schedule: str | None = None,
    warmup: Annotated[int | None, Parameter(converter=whole)] = None,
    fan_in: Annotated[int | None, Parameter(converter=whole)] = None,
    init_norm: float | None = None,
    batch: Annotated[int | None, Parameter(converter=whole)] = None,
    loss_scale: float | None = None,
    gamma: Literal["uniform", "normal"] | None = None,
    seed: Annotated[int | None, Parameter(converter=whole)] = None,
    lr: Annotated[float | None, Parameter(group=_PEAK)] = None,
    weight_decay: Annotated[float | None, Parameter(group=_PEAK)] = None,
    momentum: Annotated[float | None, Parameter(group=_PEAK)] = None,
    betas: Annotated[tuple[float, float] | None, Parameter(group=_PEAK)] = None,
    eps: Annotated[float | None, Parameter(group=_PEAK)] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Say what lr, decay and schedule will do to norm and rotation, before training.

    The run is given by options, or by a TOML file with the same keys, changed by whatever else is given.

    ```sh
    rwsim plan --optimizer adamw --lr 5e-2 --weight-decay 1e-2 --steps 78200
    rwsim plan run.toml --schedule cosine --warmup 1955
    ```

    Parameters
    ----------
    file
        TOML file with the options' names as keys (weight_decay for --weight-decay).
    optimizer
        A rule (a name, or FILE.py:RULE).
    steps
        Length of the run.
    schedule
        Of lr: constant, linear, cosine, wsd, step, warmup0.1+cosine, ..., or a file of one factor per step. Default: constant.
    warmup
        Steps of linear warmup before a named schedule. Default: 0.
    fan_in
        C, weights per neuron. Default: 128.
    init_norm
        RMS norm of a neuron's weights at the start. Default: 0.577, torch's for a linear layer.
    batch
        B of the assumed gradients. Default: 32.
    loss_scale
        Their scale; it matters to SGD-like rules and adam_l2. Default: 1.
    gamma
        Scales of the inputs: all one or standard normal draws. Default: uniform.
    seed
        Of those draws. Default: 0.
    lr
        Learning rate.
    weight_decay
        Weight decay.
    momentum
        Momentum of SGD-like rules.
    betas
        Averages of the Adam-like rules and lion.
    eps
        Constant beside the root.
    out
        Directory for plan.png and plan.json.
    json_file
        Also write the plan to this file.
    quiet
        Print nothing but errors.
    """
    given = {
        "optimizer": optimizer, "steps": steps, "schedule": schedule, "warmup": warmup, "fan_in": fan_in, "init_norm": init_norm,
        "batch": batch, "loss_scale": loss_scale, "gamma": gamma, "seed": seed, "lr": lr, "weight_decay": weight_decay,
        "momentum": momentum, "betas": betas, "eps": eps,
    }  # fmt: skip
    options: dict[str, Any] = {**({} if file is None else _read(file, set(given))), **{k: v for k, v in given.items() if v is not None}}
    for name, example in (("optimizer", "adamw"), ("steps", "10000")):
        if name not in options:
            raise InvalidArgument(name, "must be given, here or in a file", None, f"e.g. --{name} {example}")
    if out is not None:
        check_place("--out", out, folder=True)
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    if isinstance(options.get("schedule"), str):
        options["schedule"] = _schedule(options["schedule"])
    from rwsim.plan import plan as foresee

    found = foresee(options.pop("optimizer"), **options)
    text = json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n"
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text)
    if not quiet:
        for layer in found.layers:
            print("\n".join(_lines(layer)))
        for warning in found.warnings:
            print(f"warning: {warning}")
    if out is not None:
        from rwsim.plots import save_plan

        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_text(text)
        save_plan(found, out)
        if not quiet:
            print(f"Written to {out}: plan.json, plan.png")
    return HOLDS


_KINDS: dict[str, tuple[type, ...]] = {"optimizer": (str,), "schedule": (str, list), "gamma": (str,), "betas": (list,)}
_WHOLE = ("steps", "warmup", "fan_in", "batch", "seed")


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    """The keys of a TOML file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgument("file", "must be a TOML file", str(path), str(reason)) from None
    for key, value in values.items():
        if key not in known:
            raise InvalidArgument(key, f"is not a key of {path.name}", value, f"known: {', '.join(sorted(known))}")
        kinds = _KINDS.get(key, (int,) if key in _WHOLE else (int, float))
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InvalidArgument(key, f"must be {' or '.join(kind.__name__ for kind in kinds)}", value)
    return values


def _schedule(text: str) -> str | list[float]:
    """A schedule's name, or the factors in a file."""
    path = Path(text)
    if not path.is_file():
        return text
    try:
        return [float(line) for line in path.read_text().split()]
    except (OSError, UnicodeDecodeError, ValueError):
        raise InvalidArgument(
            "schedule", "must name a file of one factor per step", text, "for example 1.0 a line, as many as --steps"
        ) from None


def _lines(layer: "LayerPlan") -> list[str]:
    """One layer in words."""
    steps, path = layer.steps, layer.path

    def at(step: int | None) -> str:
        return "never" if step is None else f"step {step:,} ({step / steps:.0%} of the run)"

    constant = layer.time_constant
    lines = [f"{layer.name}: {layer.rule!r}, fan-in {layer.fan_in}, {steps:,} steps"]
    lines.append(f"  norm            starts at {layer.start_norm:.3g}, ends at {path.norm[-1]:.3g}, at most {path.norm.max():.3g}")
    if math.isfinite(constant):
        lines.append(f"  time constant   {constant:,.0f} steps at the peak ({constant / steps:.2g} of the run)")
        lines.append(f"  equilibrium     reached: {at(layer.reached)}; in it for {layer.share:.0%} of the run")
        lines.append(f"  rotation        before it: up to {layer.transient:.2g} of the intended one; at the end: {layer.lag:.2g}")
    rates = f"  update sizes    eta_g {layer.eta_g:.3g} for a gain or bias"
    if math.isfinite(layer.eta_r):
        rates += f", eta_r {layer.eta_r:.3g} rad for the weights: eta_r/eta_g = {layer.eta_r / layer.eta_g:.3g}"
    lines.append(rates)
    if not math.isnan(layer.highest_lr):
        lines.append(f"  stable          at this decay for lr below {layer.highest_lr:g}")
    return lines
