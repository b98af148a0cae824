"""The published form of what every command writes with --json: one model a command, from which its JSON schema is generated.

`rwsim schema COMMAND` prints the schema; docs/schemas/ holds them all. What is not a number where one could be (an error bar that there is
none of) is null.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from rwsim.config import Settings

Number = float | None
Rate = Annotated[float, Field(ge=0)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)


# validate.


class GradNorm(_Document):
    """E||g~||^2 of one case."""

    optimizer: str
    measured: Number
    computed: Number


class ValidateMeta(Settings):
    """How it was walked."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)
    rwsim: str
    torch: str
    false_alarm_rate: float
    seconds: Rate
    status: Literal["complete", "WalkDiverged", "WalkInterrupted"]
    message: str
    """Why it ended early; else empty."""
    passed: bool
    unit_grad_norm_sq: list[GradNorm]


class ValidateRecord(_Document):
    """One quantity of one optimizer."""

    optimizer: str
    hyper: dict[str, float | list[float]]
    loss_scale: float
    gradient: Literal["marginal", "faithful", "gaussian"]
    quantity: Literal["norm", "rotation", "rms_update"]
    """sqrt of the mean of ||w||^2 over neurons and time; mean angle, radians per step; RMS of the gradient part of an update."""
    measured: Number
    mcse: Number
    """Standard error of `measured`, in its units."""
    predicted: dict[Literal["paper", "exact", "full"], Number]
    relative_error: dict[Literal["paper", "exact", "full"], Number]
    """measured / predicted - 1."""
    verdict: Literal["agrees", "differs", "undecided"]
    reason: str
    margin: float
    interval: Number
    effective_samples: Number
    burn_in: int | None
    steps: int
    """Walked."""
    looks: int
    """At which it might have been decided: they share the false-alarm rate with all quantities of the run."""
    layers: int


class Validate(_Document):
    """rwsim validate --json, and validation.json."""

    meta: ValidateMeta
    records: list[ValidateRecord]


# derive.


class DeriveStep(_Document):
    """One step; its sides in LaTeX."""

    name: str
    lhs: str
    relation: str
    rhs: str
    reason: str
    checked: str
    """How: symbolic, numeric."""


class DeriveResult(_Document):
    """One derivation, as far as it holds."""

    id: str
    title: str
    where: str
    ok: bool
    failure: str
    steps: list[DeriveStep]


class Derive(RootModel[list[DeriveResult]]):
    """rwsim derive --json."""


# sweep.


class Sweep(_Document):
    """rwsim sweep --json: a flat object a point, of its coordinates (`optimizer` and the axes) and variables."""

    meta: dict[str, str | int | float | bool]
    points: list[dict[str, str | int | Number]]


# plan.


class PlanMeta(_Document):
    """Of which run."""

    rwsim: str
    optimizer: str
    steps: Annotated[int, Field(ge=1)]


class PlanLayer(_Document):
    """What to expect of one layer; rwsim.plan.LayerPlan says what each is."""

    name: str
    fan_in: int
    start_norm: Number
    time_constant: Number
    time_constant_share: Number
    """Of the run."""
    reached: int | None
    left: int | None
    share: Number
    transient: Number
    lag: Number
    eta_r: Number
    eta_g: Number
    table_off: Number
    highest_lr: Number
    hyper: dict[str, float | list[float]]
    path: dict[str, list[Number]]
    """Columns, among them `step` and `lr`, at 201 steps at most."""


class Plan(_Document):
    """rwsim plan --json, and plan.json."""

    meta: PlanMeta
    layers: list[PlanLayer]
    warnings: list[str]


# convert.


class ConvertMeta(_Document):
    """For which gradients."""

    rwsim: str
    gradient: Literal["marginal", "gaussian"]
    batch: int
    fan_in: int
    neurons: int
    gamma: Literal["uniform", "normal"]
    loss_scale: float
    seed: int


class ConvertRule(BaseModel):
    """A rule and its hyperparameters, whichever it has."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, float | list[float]] = Field(init=False)
    optimizer: str
    lr: float
    weight_decay: float


class ConvertQuantity(_Document):
    """One quantity under both."""

    name: str
    unit: str
    before: float
    after: float
    matched: bool


class Convert(_Document):
    """rwsim convert --json."""

    meta: ConvertMeta
    source: ConvertRule = Field(alias="from")
    to: ConvertRule
    match: Literal["rotation", "diffusion"]
    quantities: list[ConvertQuantity]
    notes: list[str]
    """What is not kept, in words."""
    unit_grad_norm_sq: float


# audit.


class AuditFinding(_Document):
    """One difference from the law, or one thing worth knowing."""

    code: str
    kind: Literal["fault", "convention", "note"]
    severity: Literal["high", "medium", "low"]
    text: str
    probes: list[str]
    effect: Number
    error: Number
    snippet: str


class AuditOutcome(_Document):
    """How one probe ended."""

    probe: str
    status: Literal["held", "departed", "not applicable", "unfinished"]
    reason: str
    measured: dict[str, Any]


class Audit(_Document):
    """rwsim audit --json: the same text again for the same seed, so no times."""

    format: Literal[1]
    subject: str
    law: str | None
    identity: str
    passed: bool
    finished: bool
    findings: list[AuditFinding]
    outcomes: list[AuditOutcome]
    meta: dict[str, Any]


# export and verify.


class VerifyCheck(_Document):
    """One thing that was verified."""

    name: str
    passed: bool
    text: str
    figures: dict[str, Number]


class Verify(_Document):
    """rwsim export --json and rwsim verify --json."""

    file: str
    subject: str
    passed: bool
    checks: list[VerifyCheck]


# experiment.


class ExperimentMeta(_Document):
    """What was trained, where and when."""

    rwsim: str
    experiment: str
    config: str
    device: str
    seed: int
    date: str


class ExperimentRow(_Document):
    """One quantity of one layer; rwsim.experiments.findings.Row says what each is."""

    case: str
    layer: str
    fan_in: int
    invariant: bool
    quantity: str
    band: float
    verdict: Literal["inside", "outside", "undecided", "not judged"]
    measured: Number
    predicted: Number
    error: Number
    interval: Number
    paper: Number
    corrected: Number
    note: str


class ExperimentClaim(_Document):
    """One comparison of trainings; rwsim.experiments.compare.Claim says what each is."""

    subject: str
    claim: str
    rule: str
    verdict: Literal["held", "did not hold", "undecided"]
    difference: Number
    interval: Number
    margin: Number
    unit: str
    a: Number
    a_spread: Number
    b: Number
    b_spread: Number
    seeds: int
    note: str


class ExperimentDynamics(_Document):
    """Of an experiment that measures dynamics against theory."""

    meta: ExperimentMeta
    rows: list[ExperimentRow]
    says: list[str]
    passed: bool


class ExperimentStudy(_Document):
    """Of an experiment that compares trainings."""

    meta: ExperimentMeta
    claims: list[ExperimentClaim]
    verdict: Literal["held", "held in part", "did not hold", "undecided"]
    says: list[str]


class Experiment(RootModel[ExperimentDynamics | ExperimentStudy]):
    """rwsim experiment --json."""


# doctor.


class DoctorGpu(_Document):
    """A CUDA device."""

    name: str
    memory: int
    """In bytes."""
    capability: str


class DoctorTrouble(_Document):
    """Something that is not as it should be."""

    what: str
    remedy: str
    fatal: bool
    """Whether rwsim cannot do its main job."""


class Doctor(_Document):
    """rwsim doctor --json; rwsim.doctor.Health says what each is."""

    rwsim: str
    place: str
    editable: bool | None
    python: str
    platform: str
    packages: dict[str, str | None]
    cores: int
    threads: int
    gpus: list[DoctorGpu]
    triton: Literal["compiles", "fails", "interprets", "idle", "absent"]
    extras: dict[str, list[str]]
    places: dict[str, str | None]
    troubles: list[DoctorTrouble]
    passed: bool


DOCUMENTS: dict[str, type[BaseModel]] = {
    "validate": Validate, "derive": Derive, "sweep": Sweep, "plan": Plan, "convert": Convert, "audit": Audit, "export": Verify,
    "verify": Verify, "experiment": Experiment, "doctor": Doctor,
}  # fmt: skip


def schema(command: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what a command writes with --json.

    Example:
        >>> schema("plan")["required"]
        ['meta', 'layers', 'warnings']
    """
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **DOCUMENTS[command].model_json_schema()}
