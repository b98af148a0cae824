"""`rwsim convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from rwsim.cli.shared import HOLDS, OUTPUT, Whole, check_place, write_json

if TYPE_CHECKING:
    from rwsim.convert import Conversion

_FROM = Group("Hyperparameters of --from", sort_key=2)
_TO = Group("Hyperparameters of --to (lr and weight decay are solved for)", sort_key=2)
_LAW = Group("Gradients", sort_key=3)


def convert(
    *,
    source: Annotated[str, Parameter(name="--from")],
    to: str,
    match: Literal["rotation", "diffusion"] = "rotation",
    lr: Annotated[float | None, Parameter(group=_FROM)] = None,
    weight_decay: Annotated[float | None, Parameter(group=_FROM)] = None,
    momentum: Annotated[float | None, Parameter(group=_FROM)] = None,
    betas: Annotated[tuple[float, float] | None, Parameter(group=_FROM)] = None,
    eps: Annotated[float | None, Parameter(group=_FROM)] = None,
    to_momentum: Annotated[float | None, Parameter(group=_TO)] = None,
    to_betas: Annotated[tuple[float, float] | None, Parameter(group=_TO)] = None,
    to_eps: Annotated[float | None, Parameter(group=_TO)] = None,
    fan_in: Annotated[Whole, Parameter(group=_LAW)] = 128,
    batch: Annotated[Whole, Parameter(group=_LAW)] = 32,
    neurons: Annotated[Whole, Parameter(group=_LAW)] = 128,
    gradient: Annotated[Literal["marginal", "gaussian"], Parameter(group=_LAW)] = "marginal",
    gamma: Annotated[Literal["uniform", "normal"], Parameter(group=_LAW)] = "uniform",
    loss_scale: Annotated[float, Parameter(group=_LAW)] = 1.0,
    seed: Annotated[Whole, Parameter(group=_LAW)] = 0,
    json_file: Annotated[Path | None, Parameter(name="--json", group=OUTPUT)] = None,
    quiet: Annotated[bool, Parameter(negative=(), group=OUTPUT)] = False,
) -> int:
    """Hyperparameters of another optimizer with the same equilibrium rotation and update size, and what they cannot keep.

    Between decay conventions too: sgdm (decay inside the buffer) and sgdw (decoupled), adamw (decay times lr) and adamw_independent (not).

    Updates of SGD-like rules follow the gradient's size, those of AdamW and Lion do not. A conversion between the two holds
    for one gradient scale: that of the toy system described by the options below.

    ```sh
    rwsim convert --from adamw --lr 1e-3 --weight-decay 0.1 --to lion
    rwsim convert --from sgdm --lr 0.1 --weight-decay 5e-4 --to sgdw
    ```

    Parameters
    ----------
    source
        Rule to convert: a name, or FILE.py:RULE.
    to
        Rule to convert to.
    match
        rotation: rotation and RMS update per step. diffusion: their rates over many steps, whatever the momentum.
    lr
        Learning rate.
    weight_decay
        Weight decay.
    momentum
        Momentum.
    betas
        Averages.
    eps
        Added to the root.
    to_momentum
        Momentum of --to. Default: that of --from where both have one default, else --to's own.
    to_betas
        Averages of --to. Default: likewise.
    to_eps
        Added to --to's root. Default: likewise.
    fan_in
        C, weights per neuron.
    batch
        B, inputs per step.
    neurons
        K, neurons per layer.
    gradient
        marginal: the toy system, whose gradients shrink as the norm grows. gaussian: free gradients of unit variance.
    gamma
        Scales of inputs and outputs: all one, or the normal draws of the layer that `validate` draws of --seed.
    loss_scale
        Factor on the output gradients.
    seed
        Of normal gammas; nothing else is random.
    json_file
        Also write everything to this file.
    quiet
        Print nothing but errors.
    """
    if json_file is not None:
        check_place("--json", json_file, folder=False)
    import rwsim

    hyper: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
    to_hyper = {"momentum": to_momentum, "betas": to_betas, "eps": to_eps}
    settings: dict[str, Any] = {"fan_in": fan_in, "neurons": neurons, "gamma": gamma, "loss_scale": loss_scale, "seed": seed}
    found = rwsim.convert(
        source, to, match=match, batch=None if gradient == "gaussian" else batch, **settings,
        to_hyper={k: v for k, v in to_hyper.items() if v is not None}, **{k: v for k, v in hyper.items() if v is not None},
    )  # fmt: skip
    if not quiet:
        _print(found)
    if json_file is not None:
        meta = {"rwsim": rwsim.__version__, "gradient": gradient, "batch": batch, **settings}
        write_json(json_file, {"meta": meta, **found.to_json()})
    return HOLDS


def _print(found: "Conversion") -> None:
    """Hyperparameters, then what is kept and what is not."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, justify in (("", "left"), (found.source.name, "right"), (found.target.name, "right"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # rich spells its literals out
    before, after = vars(found.source.values), vars(found.target.values)
    solved = ("lr", "weight_decay")
    for name in dict.fromkeys([*before, *after]):
        table.add_row(name, _text(before.get(name)), _text(after.get(name)), "solved" if name in solved else "")
    table.add_section()
    for quantity in found.quantities:
        ratio = "" if quantity.unit == "exponent" else f"{round(quantity.after / quantity.before - 1, 4) + 0.0:+.2%}"  # no -0
        change = "matched" if quantity.matched else ratio
        label = f"{quantity.name} ({quantity.unit})" if quantity.unit not in ("", "exponent") else quantity.name
        table.add_row(label, *(_text(v, 2 if quantity.unit == "exponent" else 0) for v in (quantity.before, quantity.after)), change)
    console = Console(highlight=False, soft_wrap=False)
    console.print(table)
    console.print(f"Solved at E||g~||^2 = {found.unit_grad_norm_sq:.4g}. {'Not matched:' if found.notes else 'All of it agrees.'}")
    for note in found.notes:
        console.print(f"- {note}", markup=False)


def _text(value: Any, places: int = 0) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return " ".join(f"{x:g}" for x in value)
    return f"{value:.{places}f}" if places else f"{value:.6g}"
