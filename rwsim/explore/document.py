"""The page: sliders, numbers and figures around the printed formulas, as one document."""

from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from rwsim import __version__
from rwsim.explore import formulas
from rwsim.explore.mathml import rule_formulas
from rwsim.explore.server import PLACE, TOKEN_HEADER
from rwsim.explore.setting import DEFAULTS, LABELS, LAW, NEURONS, RUN, Control, hyper_controls, keys, paper_values
from rwsim.optimizers import RULES
from rwsim.page.chart import figure
from rwsim.page.document import page
from rwsim.page.html import Html, data, join, tag
from rwsim.plan import LIVE, LONG, NEAR
from rwsim.theory.factors import SHAPES

# Positions of a slider: a step is a few percent of a value.
_STEPS = 1000
_SERIES = (
    ("path", "line", "the walk, step by step"),
    ("exact", "line", "exact equilibrium"),
    ("paper", "line", "paper, Table 1"),
    ("measured", "dot", "simulated, ± 2 standard errors"),
    ("full", "line", "full prediction (rwsim plan)"),
)
_SCHEDULES = {
    "constant": "constant", "linear": "linear to zero", "cosine": "cosine to zero",
    "wsd": "constant, last fifth linear to zero", "step": "a tenth after 1/2 and 3/4",
}  # fmt: skip


@cache
def _part(name: str) -> str:
    return files("rwsim.explore").joinpath(name).read_text(encoding="utf-8")


def document(token: str = "") -> str:
    """The whole page.

    Args:
        token: Of the server that will serve it; empty for a file, which cannot simulate.

    Example:
        >>> text = document()
        >>> text.startswith("<!doctype html>"), "https:" in text
        (True, False)
    """
    body = join(
        tag("div", _controls(), _results(bool(token)), class_="bench"),
        tag("h2", "Formulas"),
        tag(
            "p",
            "What the curves are drawn from. rwsim derives these expressions from each optimizer's one update rule and prints the "
            "program of this page from them.",
        ),
        [tag("section", rule_formulas(name), id=f"formulas-{name}", data_rule=name, hidden=name != "adamw") for name in formulas.NAMES],
        tag("h2", "What is drawn"),
        _notes(),
    )
    lead = tag(
        "p",
        "Weight decay and gradient noise bring each neuron's weight vector to an equilibrium: a norm at which it stays and an angle by "
        "which it turns with every step. Move a slider and see both, and the way there.",
        class_="lead",
    )
    script = "\n".join([f"const THEORY = {formulas.javascript()};", *map(_part, ("runtime.js", "plot.js", "explorer.js"))])
    footer = join("rwsim ", __version__, ", after Kosson, Messmer and Jaggi, Rotational Equilibrium, ICML 2024 (arXiv:2305.17212)")
    return page(
        "Rotational equilibrium explorer", join(body, data("explore", _config(token))), lead=lead, script=script,
        style=_part("explorer.css"), footer=footer, connect=bool(token),
    )  # fmt: skip


def _config(token: str) -> dict[str, Any]:
    """What the page's script is told."""
    return {
        "controls": [asdict(control) for control in (*hyper_controls(), *LAW, *RUN)],
        "rules": {name: {"label": LABELS[name], "keys": keys(RULES[name]), "values": paper_values(name)} for name in formulas.NAMES},
        "flat": {name: [key if key in keys(RULES[name]) else None for key in _flat(name)] for name in formulas.NAMES},
        "defaults": DEFAULTS,
        "schedules": list(SHAPES),
        "neurons": NEURONS,
        "steps": _STEPS,
        "near": NEAR,
        "long": LONG,
        "live": LIVE,
        "server": {"place": PLACE, "header": TOKEN_HEADER, "token": token} if token else None,
    }


def _flat(name: str) -> list[str]:
    """Names of the arguments that a rule's formulas take first; eps, which is 0 here, among them."""
    return [
        f"{key}_{i + 1}" if isinstance(default, tuple) else key
        for key, default in RULES[name].hyper.items()
        for i in range(len(default) if isinstance(default, tuple) else 1)
    ]


def _controls() -> Html:
    radios = [
        tag(
            "label", tag("input", type="radio", name="optimizer", value=name, checked=name == "adamw"), tag("span", LABELS[name]),
            class_="choice",
        )
        for name in formulas.NAMES
    ]  # fmt: skip
    schedule = tag(
        "div",
        tag("label", "Schedule of the learning rate", for_="schedule"),
        tag("select", [tag("option", _SCHEDULES[name], value=name) for name in SHAPES], id="schedule"),
        class_="control wide",
    )
    return tag(
        "form",
        tag("fieldset", tag("legend", "Optimizer"), tag("div", radios, class_="choices")),
        tag("fieldset", tag("legend", "Hyperparameters"), map(_control, hyper_controls())),
        tag("fieldset", tag("legend", "Gradients"), map(_control, LAW)),
        tag("fieldset", tag("legend", "Run"), schedule, [_control(RUN[i]) for i in (2, 0, 1)]),
        tag(
            "div",
            tag("button", "Copy link", type="button", id="copy"),
            tag("button", "Paper's setting", type="button", id="reset"),
            class_="buttons",
        ),
        tag("p", id="copied", role="status", class_="small soft"),
        id="controls", aria_label="Setting", autocomplete="off",
    )  # fmt: skip


def _control(control: Control) -> Html:
    problem = f"{control.key}-problem"
    return tag(
        "div",
        tag("label", control.label, " ", tag("i", control.symbol) if control.symbol else None, _hint(control), for_=control.key),
        tag(
            "input", type="number", id=control.key, step="1" if control.whole else "any", min=control.least, max=control.most,
            inputmode="numeric" if control.whole else "decimal", aria_describedby=problem,
        ),
        tag("input", type="range", id=f"{control.key}-slider", min=0, max=_STEPS, aria_label=f"{control.label}, slider"),
        tag("p", id=problem, class_="problem"),
        class_="control", data_key=control.key,
    )  # fmt: skip


def _hint(control: Control) -> Html | None:
    return tag("span", f" {control.hint}", class_="hint") if control.hint else None


def _results(served: bool) -> Html:
    rows = [
        ("norm", "Norm ‖ω‖"),
        ("rotation", join("Rotation η", tag("sub", "r"), ", radians per step")),
        ("rms_update", join("RMS update η", tag("sub", "g"))),
    ]
    columns = {"paper": "paper", "exact": "exact", "off": "paper off by"} | ({"measured": "simulated"} if served else {})
    table = tag(
        "table",
        tag("caption", "In equilibrium at the peak of the learning rate"),
        tag("thead", tag("tr", tag("td"), [tag("th", said, scope="col", class_="n") for said in columns.values()])),
        tag(
            "tbody",
            [
                tag("tr", tag("th", said, scope="row"), [tag("td", id=f"{key}-{cell}", class_="n") for cell in columns])
                for key, said in rows
            ],
        ),
        id="numbers",
    )  # fmt: skip
    simulate = (
        tag(
            "div",
            tag("button", "Simulate this point", type="button", id="simulate", class_="main"),
            tag("p", id="simulated", role="status", class_="small"),
            class_="simulate",
        )
        if served
        else tag(
            "p", "A file cannot simulate. ", tag("code", "rwsim explore"), " serves this page with a button that walks the point and lays "
            "the measured norm and rotation over the curves.", id="no-simulation", class_="small soft",
        )
    )  # fmt: skip
    figures = [
        _figure("norm", "Norm over the run", True),
        _figure("rotation", "Rotation over the run", True),
        _figure("norm-lr", "Equilibrium norm over the learning rate", False),
        _figure("rotation-lr", "Equilibrium rotation over the learning rate", False),
    ]
    return tag(
        "div",
        tag("div", id="messages", role="alert"),
        tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Equilibrium"),
        tag("dl", tag("dt", "Time constant"), tag("dd", id="time"), tag("dt", "In equilibrium"), tag("dd", id="reached"), class_="facts"),
        simulate,
        tag("label", tag("input", type="checkbox", id="log-steps"), " Steps on a log scale", class_="choice-line"),
        tag("div", figures, class_="figures"),
        tag("p", id="said", class_="unseen", aria_live="polite"),
        tag("p", id="readout", class_="readout", aria_hidden="true"),
        class_="results",
    )


def _figure(key: str, title: str, over_steps: bool) -> Html:
    entries = []
    for style, kind, said in _SERIES:
        if not over_steps and style in ("path", "full"):
            continue
        mark = tag("path", class_=f"line {style}", d="M1 6H23") if kind == "line" else tag("path", class_=f"dot {style}", d="M12 6h0")
        key_mark = tag("svg", mark, class_="plot key", viewBox="0 0 24 12", aria_hidden="true")
        entries.append(tag("li", key_mark, " ", said, data_series=style, hidden=style in ("measured", "full")))
    if not over_steps:
        ring = tag("path", class_="here", d="M12 1v10")
        entries.append(tag("li", tag("svg", ring, class_="plot key", viewBox="0 0 24 12", aria_hidden="true"), " this learning rate"))
    return figure(f"figure-{key}", title, "", tag("g", id=f"plot-{key}"), tag("ul", entries, class_="legend"))


def _notes() -> Html:
    return tag(
        "ul",
        tag(
            "li", tag("b", "Exact equilibrium"), ": the stationary second moments of the optimizer's own update rule, to all orders in "
            "learning rate times decay. The values of ", tag("code", "rwsim.predict"), ".",
        ),
        tag("li", tag("b", "Paper"), ": Table 1 as printed, with the gradient's moments computed from the same gradients."),
        tag(
            "li", tag("b", "The walk, step by step"), ": the same second moments iterated from the initial norm with each step's learning "
            "rate and the bias corrections (", tag("code", "rwsim.theory.schedule.closed_path"), "). The full prediction of ",
            tag("code", "rwsim plan"), " adds what fluctuates: up to three percent in the first fifty steps of a normalizer, below one "
            "later. It comes with a simulation.",
        ),
        tag(
            "li", tag("b", "Gradients"), f": the random walk of the paper's toy system, {NEURONS} neurons behind a batch norm, all input "
            "scales one. They are orthogonal to the weights and shrink as the norm grows. For AdamW and Lion their size cancels.",
        ),
        tag("li", tag("b", "Schedules"), " change the learning rate only; equilibrium is then drawn for each step's own rate."),
    )  # fmt: skip
