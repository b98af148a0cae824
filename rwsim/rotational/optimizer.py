"""What all rotational optimizers share: options, groups, state, precision, and the step around a direction."""

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rwsim.errors import InvalidArgument
from rwsim.optimizers.rule import UpdateRule
from rwsim.rotational.lookup import norm_rate_of, rate_of
from rwsim.rotational.paths import check_paths, state_changes, step_fast, takes_scale
from rwsim.rotational.piece import layout_of, piece_of
from rwsim.rotational.place import fitted, shards_of
from rwsim.rotational.rotate import centre_, layout, norm_of, rounded_at_random, turn_

# Elements of a tensor that a step works on at a time on a CPU, for each thread: what it reads and writes stays in the cache.
_BLOCK = 1 << 18

OPTIONS: Mapping[str, Any] = {
    "rotation": None, "rate": "paper", "rotational": None, "per_neuron": True, "neuron_dims": (0,), "blocks": 1, "zero_mean": True,
    "update_norm_decay_factor": 0.9, "rotational_eps": 1e-8, "norm": "initial", "fixed_angle": False, "maximize": False,
}  # fmt: skip
# Of how a step is computed.
PATHS: Mapping[str, Any] = {"fused": None, "foreach": None, "capturable": False, "stochastic_rounding": False}
_IS_SPARSE = attrgetter("is_sparse")
# A hyperparameter: torch schedules tensors as well.
Number = float | int | Tensor
# What torch's schedulers put into groups.
_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
PER_VECTOR = ("norm", "update_norm_sq", "hits", "speed")


class RotationalOptimizer(torch.optim.Optimizer):
    """Base of the rotational variants: the inner optimizer's direction, projected, at a rotation that is set (paper, Algorithm 1).

    Options, of the constructor and of each parameter group:

    - ``rotation``: eta_r in radians per step. None: the inner optimizer's equilibrium rotation, from lr, weight_decay and momentum
      as they are at each step. A number, a tensor, a rule's name (``"adamw"``: its rate at the group's hyperparameters) or a function
      of the group; assign ``group["rotation"]`` to schedule it apart from lr.
    - ``rate``: which form of a rule's rate: ``"paper"`` (Table 1; its hyperparameters carry over) or ``"exact"``.
    - ``rotational``: whether the group's parameters rotate. None: matrices (and tensors of more dimensions) under weight decay, or
      under a rotation that is given, whose vectors are long enough to turn. Others get the inner optimizer's own step.
    - ``per_neuron``: one vector a neuron (True), or one a tensor. ``neuron_dims``: the dimensions that index neurons: ``(0,)`` for Linear,
      Conv and Embedding, ``(1,)`` for ConvTranspose, ``(0, 1)`` for stacked experts. ``blocks``: equal parts of dimension 0 with vectors of
      their own: groups of a grouped ConvTranspose, q, k and v of a fused projection with ``per_neuron=False``.
    - ``zero_mean``: take the mean out of the vectors (in the first step, or by `centre`) and out of their updates.
    - ``update_norm_decay_factor``: beta in [0, 1) of the tracked squared update: 0.9, the paper's appendix I; its runs used 0.99.
    - ``rotational_eps``: added to the root of that average.
    - ``norm``: ``"initial"`` keeps each vector's norm; ``"equilibrium"`` sets the one that the rule would have at the
      group's hyperparameters (as lr goes to 0 so does that norm; where it is 0 the norm is kept).
    - ``fixed_angle``: turn by exactly eta_r in every step.
    - ``maximize``: follow the gradient.
    - ``fused``: Triton kernels that read each vector once, on CUDA. None takes them where they apply; True insists.
    - ``foreach``: many parameters at once, in temporary memory of their size. None takes it on CUDA for what has no kernel; True insists.
    - ``capturable``: keep the step count beside the parameter, so that a step can be captured in a CUDA graph (after one that was not).
    - ``stochastic_rounding``: round bf16 weights up or down at random, without ``residual``; the same on every replica.

    State of a parameter: ``step``, the inner optimizer's buffers, and one entry a vector of ``norm``, ``update_norm_sq`` and ``hits`` (the
    steps with a gradient that moved it). bf16 and fp16 parameters have float32 state, and ``residual``: what the parameter could not
    hold, so that steps below its resolution add up.

    A vector of zeros has no direction: it stays zero, with a warning. One of equal entries keeps its mean. What `step` finds without a
    gradient it skips; gradients are never written.
    """

    rule: ClassVar[type[UpdateRule]]
    options: ClassVar[Mapping[str, Any]] = {**OPTIONS, **PATHS}
    # Whether the decay of a rotational parameter goes through its gradient into the direction.
    decay_in_direction: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the options in the constructor's signature, where it takes them as ``**options``."""
        super().__init_subclass__(**kwargs)
        own = [one for one in inspect.signature(cls.__init__).parameters.values() if one.name != "self"]
        shown = [one for one in own if one.kind != inspect.Parameter.VAR_KEYWORD]
        if len(shown) < len(own):
            more = [*cls.hyper_shown().items(), *cls.options.items()]
            taken = {one.name for one in shown}
            shown += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=inspect.Parameter.empty if value is ... else value)
                for name, value in more if name not in taken
            ]  # fmt: skip
            cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # what inspect reads, unknown to mypy

    @classmethod
    def hyper_shown(cls) -> Mapping[str, Any]:
        """Hyperparameters that the constructor takes as ``**options``."""
        return {}

    def __init__(self, params: Any, defaults: dict[str, Any], options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in self.options:
                known = ", ".join([*(key for key in defaults if key not in self.options), *self.options])
                raise InvalidArgument(name, f"is not an option of {type(self).__name__}", options[name], f"it takes {known}")
        super().__init__(params, {**defaults, **self.options, **options})
        # Who says rotational=False knows.
        if all(group["rotational"] is None and not self._turns(group) for group in self.param_groups):
            said = "only matrices (and tensors of more dimensions) under weight decay do, or under a rotation that is given"
            warnings.warn(f"No parameter of this {type(self).__name__} rotates: {said}.", stacklevel=3)

    # What a subclass says.

    def rule_of(self, group: Mapping[str, Any]) -> type[UpdateRule]:
        """The rule that a group's inner optimizer follows."""
        return self.rule

    def buffers(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the state tensors of a parameter's own shape."""
        return self.rule.state

    def direction(self, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> Tensor:
        """What the inner optimizer would subtract, over lr and without decay: a new tensor. Buffers change in place, `grad` does not."""
        raise NotImplementedError("a rotational optimizer must define `direction`")  # reached only by a subclass without one

    def plain_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], step: Number) -> None:
        """The inner optimizer's own step, in place."""
        decay, lr = group["weight_decay"], group["lr"]
        if self.decays_through_gradient(group):
            grad = grad.add(param * decay) if isinstance(decay, Tensor) or decay else grad
        else:
            param.mul_(1 - lr * decay)
        param.sub_(self.direction(grad, state, group, step).mul_(lr))

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; its options default to the optimizer's.

        Raises:
            InvalidArgument: A value out of range, a misspelt key; ``rotational=True`` for a tensor that cannot rotate.
        """
        self._check_keys(param_group)
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_keys(self, group: Mapping[str, Any]) -> None:
        """Refuse what is nearly one of our keys, and would be ignored. Others are the caller's, as in torch."""
        known = [*self.defaults, "params"]
        for key, value in group.items():
            if key not in known and key not in _SCHEDULERS and (near := difflib.get_close_matches(key, known, 1, 0.8)):
                raise InvalidArgument(key, "is not a key of parameter groups", value, f"did you mean {near[0]}?")

    def _check(self, group: dict[str, Any]) -> None:
        self.check_hyper(group)
        for name, limit in (("update_norm_decay_factor", 1.0), ("rotational_eps", math.inf)):
            if not _lies(group[name], 0.0, limit):
                raise InvalidArgument(name, f"must lie in [0, {limit:g})", group[name], f"the default is {OPTIONS[name]}")
        if group["norm"] not in ("initial", "equilibrium"):
            raise InvalidArgument("norm", "must be one of initial, equilibrium", group["norm"])
        if group["rate"] not in ("paper", "exact"):
            raise InvalidArgument("rate", "must be one of paper, exact", group["rate"])
        dims = group["neuron_dims"]
        if isinstance(dims, str) or not isinstance(dims, Iterable) or not all(isinstance(d, int) for d in dims):
            raise InvalidArgument("neuron_dims", "must hold whole numbers", dims, "give (0,), or (1,) for a transposed convolution")
        group["neuron_dims"] = tuple(dims)
        if not isinstance(group["blocks"], int) or group["blocks"] < 1:
            raise InvalidArgument("blocks", "must be a whole number of at least 1", group["blocks"], "the default is 1")
        for param in group["params"]:
            if param.is_complex():
                raise InvalidArgument("params", f"must be real for {type(self).__name__}", param.dtype, "pass torch.view_as_real(param)")
            reason = self._cannot(group, param)
            if reason and group["rotational"]:
                raise InvalidArgument("rotational", f"cannot be True for a parameter of shape {tuple(param.shape)}: {reason}", True)
            if self.is_rotational(group, param):
                # Refuses shards that cannot rotate.
                shards_of(param, *layout_of(group, param))
        check_paths(self, group)
        if self._turns(group):
            rotation = self.rotation(group)
            if not _lies(rotation, 0.0, math.inf):
                raise InvalidArgument(
                    "rotation", "must lie in [0, inf) radians per step", rotation, "leave it out for the rate of the hyperparameters"
                )
            if group["rotational"] and group["rotation"] is None and not rotation:
                got = f"lr {group['lr']}, weight_decay {group.get('weight_decay', 0)}"
                raise InvalidArgument("rotational", "cannot be True at a rotation of 0", got, "give weight_decay or rotation")
            if group["norm"] == "equilibrium":
                norm_rate_of(self.rule_of(group), group["rate"])

    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """Raise InvalidArgument for a hyperparameter of the inner optimizer that is out of range."""
        self.rule_of(group)(**{key: _plain_number(group[key]) for key in self.rule_of(group).hyper if key in group})

    def _turns(self, group: Mapping[str, Any]) -> bool:
        """Whether any of a group's parameters is to rotate."""
        return any(self.is_rotational(group, param) for param in group["params"])

    @staticmethod
    def _cannot(group: Mapping[str, Any], param: Tensor) -> str:
        """Why a parameter cannot rotate; empty if it can."""
        per_neuron, dims, blocks = group["per_neuron"], group["neuron_dims"], group["blocks"]
        if param.dim() == 0 or param.numel() == 0:
            return "it has no vectors"
        if any(not -param.dim() <= d < param.dim() for d in dims):
            return f"neuron_dims {dims} are not dimensions of it"
        if param.shape[0] % blocks:
            return f"its dimension 0 does not fall into {blocks} blocks"
        shape, along = layout(param.shape, per_neuron, dims, blocks)
        length = math.prod(shape[d] for d in along)
        least = 3 if group["zero_mean"] else 2
        return "" if length >= least else f"vectors of {length} cannot turn{' without their mean' if group['zero_mean'] else ''}"

    def is_rotational(self, group: Mapping[str, Any], param: Tensor) -> bool:
        """Whether a parameter of a group rotates, by its option ``rotational`` or by default."""
        if group["rotational"] is not None:
            return bool(group["rotational"])
        return param.dim() > 1 and (_given(group) or _decays(group)) and not self._cannot(group, param)

    def rotation(self, group: Mapping[str, Any]) -> Any:
        """eta_r of a group as it is now, radians per step."""
        value = group["rotation"]
        if value is None:
            return rate_of(self.rule_of(group), group["rate"])(group)
        if isinstance(value, str):
            try:
                return rate_of(value, group["rate"])(group)
            except InvalidArgument as error:
                raise InvalidArgument("rotation", error.rule, error.got, error.remedy) from None
        return value(group) if callable(value) else value

    # Steps.

    @torch.no_grad()
    def centre(self) -> None:
        """Take the mean out of all rotational vectors now, at their norm (Algorithm 1, lines 1 to 5).

        Without it the first step does so, just before it turns them: its gradients then belong to weights with their means.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if group["zero_mean"] and param.requires_grad and self.is_rotational(group, param):
                    self._begin(param, group, self.state[param])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Args:
            closure: Evaluates the loss again and returns it; it runs with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: A sparse gradient; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            for group in self.param_groups:
                self._step_traced(group)
            return loss
        self._refuse_sparse()
        stepping = [[param for param in group["params"] if param.grad is not None] for group in self.param_groups]
        angles = [self._angle(group, params) for group, params in zip(self.param_groups, stepping, strict=True)]
        for place, (group, params, angle) in enumerate(zip(self.param_groups, stepping, angles, strict=True)):
            for param in step_fast(self, place, group, params, angle):
                if param.grad is None or not param.numel():
                    continue
                state, rotational = self.prepare(param, group)
                state["step"] += 1
                self._step_param(param, param.grad, group, state, rotational, angle)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks: whether a step reads the scale, and whether gradients overflowed, on the device."""
        return takes_scale(self)

    def decays_through_gradient(self, group: Mapping[str, Any]) -> bool:
        """Whether the inner optimizer's decay of what does not rotate is part of its gradient."""
        return coupled(self.rule_of(group))

    def _angle(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> Any:
        """eta_r of a group that has something to turn; None for others."""
        # Without decay or a rotation nothing turns by default.
        idle = group["rotational"] is None and not _given(group) and not _decays(group)
        if idle or not any(self.is_rotational(group, param) for param in params):
            return None
        angle = self.rotation(group)
        if not isinstance(angle, Tensor) and not 0 <= angle < math.inf:
            raise InvalidArgument("rotation", "must lie in [0, inf) radians per step", angle, "nothing has changed in this step")
        return angle

    def _refuse_sparse(self) -> None:
        for group in self.param_groups:
            if any(map(_IS_SPARSE, [param.grad for param in group["params"] if param.grad is not None])):
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: build the embedding with sparse=False")

    def prepare(self, param: Tensor, group: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """A parameter's state, with all that a step needs in it, and whether it rotates."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), device=param.device if group["capturable"] else None)
        elif group["capturable"] and state["step"].device != param.device:
            state["step"] = state["step"].to(param.device)
        work = work_type(param)
        for name in self.buffers(group):
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=work, memory_format=torch.preserve_format)
        if group["stochastic_rounding"] and param.dtype == torch.bfloat16:
            state.pop("residual", None)
        elif work != param.dtype and "residual" not in state:
            state["residual"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        rotational = self.is_rotational(group, param)
        if rotational:
            self._begin(param, group, state)
        else:
            forget(state)
        return state, rotational

    def _init_group(self, group: dict[str, Any], tensors: list[Tensor]) -> str:
        """Prepare a group for `_step_traced`, and put all its tensors into a list.

        torch.compile runs a method of this name as it stands, and makes inputs of its graph of what is in the list.

        Returns:
            Where `_RATES` has the group's rate, then of each parameter "rotates?,name,name,...", with semicolons between.
        """
        rule = group["rotation"] if isinstance(group["rotation"], str) else self.rule_of(group)
        # Two files may have rules of one name.
        lines = [f"{rule if isinstance(rule, str) else id(rule)} {group['rate']}"]
        # What is found out by trying rules is not for a compiler to follow.
        self.decays_through_gradient(group)
        if not _given(group) and lines[0] not in _RATES:
            _RATES[lines[0]] = rate_of(rule, group["rate"])
        with torch.no_grad():
            for param in group["params"]:
                if param.grad is None or not param.numel():
                    continue
                if param.grad.is_sparse:
                    self._refuse_sparse()
                state, rotational = self.prepare(param, group)
                held = {"param": param, "grad": param.grad, **state}
                lines.append(",".join(["yes" if rotational else "no", *held]))
                tensors += held.values()
        return ";".join(lines)

    def _step_traced(self, group: dict[str, Any]) -> None:
        """The step as torch.compile sees it: tensors in, operations on tensors."""
        tensors: list[Tensor] = []
        rate, *lines = self._init_group(group, tensors).split(";")
        angle = None
        if any(line.startswith("yes") for line in lines):
            angle = self.rotation(group) if _given(group) else _RATES[rate](group)
        first = 0
        for line in lines:
            rotates, *names = line.split(",")
            state = dict(zip(names, tensors[first : first + len(names)], strict=True))
            first += len(names)
            param, grad = state.pop("param"), state.pop("grad")
            state["step"] += 1
            self._step_param(param, grad, group, state, rotates == "yes", angle)

    def _begin(self, param: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Give a parameter that is about to rotate for the first time its norms, and take the mean out."""
        shape, dims = layout_of(group, param)
        kept = tuple(1 if d in dims else size for d, size in enumerate(shape))
        if "norm" in state and state["norm"].shape == kept:
            return
        forget(state, kept)
        shards = shards_of(param, shape, dims)
        own, total = (param, None) if shards is None else (shards.local(param), shards.total)
        vectors = own.view(own.shape) if shape == param.shape else own.unflatten(0, shape[:2])
        work = vectors.to(work_type(param))
        count = math.prod([shape[d] for d in dims])
        norm = centre_(work, dims, total, count) if group["zero_mean"] else norm_of(work, dims, total)
        if not bool(norm.all()):
            text = f"{int((norm == 0).sum())} of {norm.numel()} vectors of a parameter of shape {tuple(param.shape)} are zero: they have "
            warnings.warn(text + "no direction and stay zero; put it into a group with rotational=False to train it", stacklevel=4)
        vectors.copy_(work)
        for name, value in (("norm", norm), ("update_norm_sq", torch.zeros_like(norm)), ("hits", torch.zeros_like(norm))):
            state[name] = value if shards is None else shards.per_vector(value)

    def _step_param(
        self, param: Tensor, grad: Tensor, group: Mapping[str, Any], state: dict[str, Any], rotational: bool, angle: Any
    ) -> None:
        # On the device where a graph is made of this; in float64, where 1 - beta^t keeps its digits.
        step = state["step"].double() if group["capturable"] or torch.compiler.is_compiling() else float(state["step"])
        names = [name for name in ("residual", *self.buffers(group)) if name in state]
        own = {name: state[name] for name in PER_VECTOR if rotational and name in state}
        piece = piece_of(param, group, {"param": param, "grad": grad, **{name: state[name] for name in names}}, own, rotational)
        norm = self.set_norm(group, piece.fan_in) if rotational else None
        # Processes that add up their sums must do so equally often.
        whole = 0 in piece.dims or param.device.type != "cpu" or piece.total is not None or torch.compiler.is_compiling()
        first = 0
        for part in _blocks(piece.tensors | piece.numbers, whole):
            self.step_part(part, group, step, rotational, angle, piece.dims, norm, piece.total, piece.fan_in, first)
            first += part["param"].numel()

    def step_part(
        self, part: Mapping[str, Any], group: Mapping[str, Any], step: Number, rotational: bool, angle: Any, dims: Any, norm: float | None,
        total: Callable[[Tensor], Tensor] | None, count: Any, first: int = 0,
    ) -> None:  # fmt: skip
        """A step of some rows of a parameter, or of many parameters (`foreach.Many`).

        Args:
            part: ``param``, ``grad`` and the tensors of its state.
            group, step, angle: Hyperparameters, the step's number, eta_r.
            rotational: Whether it rotates.
            dims, norm, total, count: As in `rotate.turn_`.
            first: Place of the part's first element in the parameter.
        """
        target, residual = part["param"], part.get("residual")
        low = target.dtype != work_type(target)
        vectors = target.float() if low else target
        if residual is not None:
            vectors.add_(residual)
        grad = part["grad"].float() if low else part["grad"]
        if group["maximize"]:
            grad = -grad
        if not rotational:
            self.plain_(vectors, grad, part, group, step)
        else:
            if self.decay_in_direction:
                grad = grad + group["weight_decay"] * vectors
            update = self.direction(grad, part, group, step)
            turn_(
                vectors, update, dims, part, angle, zero_mean=group["zero_mean"], decay=group["update_norm_decay_factor"],
                eps=group["rotational_eps"], fixed_angle=group["fixed_angle"], norm=norm, grad=part["grad"],
                total=total, count=count,
            )  # fmt: skip
        if group["stochastic_rounding"] and target.dtype == torch.bfloat16:
            target.copy_(rounded_at_random(vectors, first, step))
        elif low:
            target.copy_(vectors)
        if residual is not None:
            residual.copy_(vectors.sub_(target))

    def set_norm(self, group: Mapping[str, Any], fan_in: int) -> float | None:
        """The norm that a group's vectors are given: None, they keep theirs, but with ``norm="equilibrium"`` (at lr 0 there is none)."""
        if group["norm"] != "equilibrium" or not float(group["lr"]) or not float(group.get("weight_decay", 0)):
            return None
        norm = float(norm_rate_of(self.rule_of(group), group["rate"])(group, fan_in))
        return norm if 0 < norm < math.inf else None

    # Saving.

    def _complete(self) -> None:
        """Give every group the options that it lacks: a state that torch's own optimizer or an older version saved has none."""
        for group in self.param_groups:
            for name, default in self.options.items():
                group.setdefault(name, self.defaults.get(name, default))

    def state_dict(self) -> dict[str, Any]:
        """As torch's; a ``rotation`` that is a function is left out, and stays as it is when a state is loaded."""
        saved = self._saved()
        for group in saved["param_groups"]:
            if callable(group.get("rotation")):
                del group["rotation"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its precision under bf16 and fp16 parameters, and shares nothing with what was loaded."""
        state_changes(self)
        rotations = [group.get("rotation", self.defaults["rotation"]) for group in self.param_groups]
        self._load(state_dict)
        for group, rotation in zip(self.param_groups, rotations, strict=True):
            group.setdefault("rotation", rotation)
        self._complete()
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = ((param, group) for group in self.param_groups for param in group["params"])
        for key, (param, group) in zip(ids, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and self._is_own(name):
                    self.state[param][name] = _placed(name, value, param, group)

    # What a wrapper leaves to the optimizer inside it.

    def _saved(self) -> dict[str, Any]:
        return super().state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)

    def _is_own(self, name: str) -> bool:
        """Whether an entry of a parameter's state is kept in the precision that it was saved in."""
        return True


# Rates that compiled steps use.
_RATES: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
_COUPLED: dict[type[UpdateRule], bool] = {}


def coupled(rule: type[UpdateRule]) -> bool:
    """Whether a rule's weight decay goes through its buffers, as the weight's own share of the gradient."""
    if rule not in _COUPLED:
        _COUPLED[rule] = _is_coupled(rule)
    return _COUPLED[rule]


def _is_coupled(rule: type[UpdateRule]) -> bool:
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    needed = {"lr": 0.5, "weight_decay": 0.5, "max_lr": 0.5, "momentum": 0.5}
    values = rule(**{key: needed[key] for key, default in rule.hyper.items() if default is ... and key in needed}).values
    values.weight_decay = 0.5
    after = rule.update(zero, SimpleNamespace(param=one, step=1, **dict.fromkeys(rule.state, zero)), values, torch)
    return any(bool(after[name] != 0) for name in rule.state)


def _lies(value: Any, low: float, limit: float) -> bool:
    """Whether a number, or a tensor of one, lies in [low, limit)."""
    try:
        return low <= float(value) < limit
    except (TypeError, ValueError, RuntimeError):
        return False


def _given(group: Mapping[str, Any]) -> bool:
    return group["rotation"] is not None and not isinstance(group["rotation"], str)


def _decays(group: Mapping[str, Any]) -> bool:
    # The value of a tensor may be known on a device only.
    decay = group.get("weight_decay", 0)
    return isinstance(decay, Tensor) or decay != 0


def _plain_number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def forget(state: dict[str, Any], shape: tuple[int, ...] | None = None) -> None:
    """Drop what is known of a parameter's vectors, but for speeds that still fit: it does not rotate, or in vectors of another shape."""
    for name in PER_VECTOR:
        if name in state and not (name == "speed" and shape in (None, tuple(state[name].shape))):
            del state[name]


def work_type(param: Tensor) -> torch.dtype:
    """The type that a step computes in."""
    return torch.float32 if param.dtype in (torch.bfloat16, torch.float16) else param.dtype


def _placed(name: str, value: Tensor, param: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A copy of a saved state tensor beside its parameter."""
    if name == "step":
        return value.clone()
    kept = param.dtype if name == "residual" else work_type(param)
    dims: tuple[int, ...]
    shape, dims = param.shape, ()
    if name in PER_VECTOR and param.dim():
        shape, dims = layout_of(group, param)
    return fitted(value.to(device=param.device, dtype=kept, copy=True), param, shape, dims)


def _blocks(tensors: Mapping[str, Tensor], whole: bool) -> Iterator[dict[str, Tensor]]:
    """Parts of tensors along dimension 0, each of about `_BLOCK` elements a thread."""
    param = tensors["param"]
    if whole or param.dim() == 0 or param.numel() <= (block := _BLOCK * torch.get_num_threads()):
        yield dict(tensors)
        return
    rows = max(1, block * param.shape[0] // param.numel())
    for parts in zip(*(tensor.split(rows) for tensor in tensors.values()), strict=True):
        yield dict(zip(tensors, parts, strict=True))
