"""RotationalWrapper: any torch optimizer's directions, at a rotation that is set."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rwsim.errors import InvalidArgument
from rwsim.rotational.optimizer import OPTIONS, PER_VECTOR, RotationalOptimizer, forget, work_type
from rwsim.rotational.piece import Piece, layout_of, piece_of
from rwsim.rotational.place import shards_of
from rwsim.rotational.rotate import turn_

# How an inner optimizer's direction depends on the weights: not at all or along them; through decay in its gradient; otherwise.
_FREE, _COUPLED, _DIFFERENCE = "free", "coupled", "difference"
# Steps of a trial: enough for what happens every few steps.
_TRIED = 12
# Relative difference of float64 steps that is rounding.
_ROUNDING = 1e-9


class RotationalWrapper(RotationalOptimizer):
    """Algorithm 1 of the paper around a torch optimizer.

    The inner optimizer takes its own step; what it would have done to a rotating parameter is its direction. Steps of a scratch
    parameter tell how that depends on the weights. Where only decay along them does, the step is taken from weights of zero: nothing of
    it is lost to rounding, and decoupled decay does nothing. Where decay is part of the gradient, it is taken from zero with that
    gradient: the decay stays in the direction, as in the special variant of the paper's appendix J. Else the direction is the
    difference that the step makes, and what points along the weights is projected out.

    Groups and state are the inner optimizer's own, with the options and the entries ``norm``, ``update_norm_sq`` and ``hits`` added: a
    scheduler may hold either optimizer. Parameters that do not rotate take the inner optimizer's step.

    Args:
        optimizer: Any torch optimizer whose step needs no closure.
        rotation: eta_r: a number in radians per step, a rule's name (its rate at the group's lr, weight_decay and momentum or betas), or a
            function of the group.
        **options: See `RotationalOptimizer`; ``norm="equilibrium"`` and ``maximize`` belong to the inner optimizer and are refused.

    Raises:
        InvalidArgument: An optimizer that needs a closure, a rate that the groups lack the hyperparameters of.

    Example:
        >>> layer = torch.nn.Linear(64, 8)
        >>> inner = torch.optim.NAdam(layer.parameters(), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True)
        >>> optimizer = RotationalWrapper(inner, rotation="nadamw")
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
    """

    options = OPTIONS

    def __init__(self, optimizer: torch.optim.Optimizer, rotation: Any, **options: Any) -> None:
        step = inspect.signature(type(optimizer).step).parameters
        if "closure" in step and step["closure"].default is inspect.Parameter.empty:
            raise InvalidArgument("optimizer", "must take its step without a closure", type(optimizer).__name__)
        if isinstance(optimizer, RotationalOptimizer) or any(OPTIONS.keys() <= group.keys() for group in optimizer.param_groups):
            rule = "must not be rotational, nor inside a RotationalWrapper, already"
            raise InvalidArgument("optimizer", rule, type(optimizer).__name__, "wrap a plain torch optimizer, once")
        if rotation is None:
            remedy = "give a number, a rule's name such as 'adamw', or a function of the group"
            raise InvalidArgument("rotation", "must be given", None, remedy)
        for name, plain in (("norm", "initial"), ("maximize", False)):
            if options.get(name, plain) != plain:
                remedy = "leave it out; the inner optimizer may have it"
                raise InvalidArgument(name, "is not an option of RotationalWrapper", options[name], remedy)
        self.inner = optimizer
        self._modes: dict[tuple[Any, ...], str] = {}
        before = [dict(group) for group in optimizer.param_groups]
        try:
            # `maximize` is the inner optimizer's own, and a group may hold it.
            super().__init__(optimizer.param_groups, dict(optimizer.defaults), {**options, "rotation": rotation})
        except Exception:
            for group, old in zip(optimizer.param_groups, before, strict=True):
                group.clear()
                group.update(old)
            raise

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor empties what it takes for its own."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """As for `state`."""

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "defaults": self.defaults, "_modes": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its options default to the wrapper's."""
        self._check_keys(param_group)
        known = any(param_group is group for group in self.inner.param_groups)
        if not known:
            self.inner.add_param_group(param_group)
        group = param_group if known else self.inner.param_groups[-1]
        for name in self.options:
            group.setdefault(name, self.defaults[name])
        try:
            self._check(group)
        except Exception:
            if not known:
                self.inner.param_groups.pop()
            raise

    def check_hyper(self, group: Mapping[str, Any]) -> None:
        """The inner optimizer has checked its own."""
        if group["norm"] == "equilibrium":
            raise InvalidArgument("norm", "is not an option of RotationalWrapper", group["norm"], "leave it out")

    def rotation(self, group: Mapping[str, Any]) -> Any:
        try:
            return super().rotation(group)
        except KeyError as error:
            rule = f"needs the hyperparameter {error.args[0]} in every group"
            raise InvalidArgument("rotation", rule, group["rotation"], "give a number or a function of the group") from None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """No: directions come from gradients that GradScaler has unscaled."""
        return False

    @torch.no_grad()
    def centre(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if group["zero_mean"] and param.requires_grad and self.is_rotational(group, param):
                    self._begin(param, group, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        self._complete()  # a group may have come through the inner optimizer
        angles = {
            id(group): self._angle(group, [param for param in group["params"] if param.grad is not None]) for group in self.param_groups
        }
        turning = [
            (param, group) for group in self.param_groups for param in group["params"]
            if param.grad is not None and param.numel() and self.is_rotational(group, param)
        ]  # fmt: skip
        turned = {id(param) for param, _ in turning}
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if id(param) not in turned and param.grad is not None and param in self.state:
                forget(self.state[param])
        begun: list[dict[str, Tensor]] = []
        for param, group in turning:
            # An optimizer that finds something in a parameter's state takes it for its own: ours goes there after its step.
            begun.append({name: value for name, value in self.state.get(param, {}).items() if name in PER_VECTOR})
            self._begin(param, group, begun[-1])
        kept = [param.detach().clone() for param, _ in turning]
        grads = [param.grad for param, _ in turning]
        try:
            for param, group in turning:
                mode = self._mode(group)
                if mode == _COUPLED:
                    # Another tensor: gradients are not written.
                    param.grad = self._decayed(param, group)
                if mode != _DIFFERENCE:
                    param.zero_()
            self.inner.step()
            updates = [self._direction_of(param, old, group) for (param, group), old in zip(turning, kept, strict=True)]
        finally:
            for (param, _), old, grad in zip(turning, kept, grads, strict=True):
                param.copy_(old)
                param.grad = grad
        lots: dict[Any, list[Piece]] = {}
        places = {id(group): place for place, group in enumerate(self.param_groups)}
        for i, ((param, group), update, own) in enumerate(zip(turning, updates, begun, strict=True)):
            # As the inner optimizer does it, by default on CUDA.
            many = param.is_cuda if group.get("foreach") is None else group["foreach"]
            shards = shards_of(param, *layout_of(group, param))
            shared = None if shards is None else (id(shards.mesh), tuple(shards.along))
            assert param.grad is not None  # as above
            alike = (param.dtype, param.grad.dtype, param.device, shared) if many else i
            lots.setdefault((places[id(group)], alike), []).append(self._piece(param, update, group, own))
        for (place, _), pieces in lots.items():
            self._turn(pieces, self.param_groups[place], angles[id(self.param_groups[place])])
        return loss

    def _direction_of(self, param: Tensor, old: Tensor, group: Mapping[str, Any]) -> Tensor:
        """What the inner optimizer's step has subtracted, over lr."""
        work = work_type(param)
        start = old.to(work) if self._mode(group) == _DIFFERENCE else 0
        lr = group["lr"]
        # Without a learning rate there is no step to tell a direction by.
        return (start - param.to(work)).div_(lr) if lr else torch.zeros_like(param, dtype=work)

    def _piece(self, param: Tensor, update: Tensor, group: Mapping[str, Any], own: dict[str, Tensor]) -> Piece:
        """What a turn needs of a parameter, whose state gets its entries back."""
        state = self.state[param]
        for name in PER_VECTOR:
            state.pop(name, None)
        tensors: dict[str, Any] = {"param": param, "update": update, "grad": param.grad}
        if work_type(param) != param.dtype:
            tensors["residual"] = state.setdefault("residual", torch.zeros_like(param))
        state.update(own)
        return piece_of(param, group, tensors, {name: own[name] for name in PER_VECTOR if name in own})

    def _turn(self, pieces: Sequence[Piece], group: Mapping[str, Any], angle: Any) -> None:
        """Turn one parameter, or several of a group that have all but their shape in common."""
        first = pieces[0]
        part: dict[str, Any] = first.tensors | first.numbers
        dims, count = first.dims, first.fan_in
        give_back: Callable[[], None] | None = None
        if len(pieces) > 1:
            from rwsim.rotational.foreach import together

            dims, (part, count, give_back) = (), together(pieces)  # type: ignore[assignment]  # a number, or one a vector
        target, residual = part["param"], part.get("residual")
        # Decay in the direction is mostly along the weights: what is left without that hangs on the order of sums, and sums on layout.
        vectors, update = target.contiguous(), part["update"].contiguous()
        if residual is not None:
            vectors = target.float().add_(residual)
        # A difference of weights holds their rounding: a row that only decay has moved stands still.
        exact = self._mode(group) != _DIFFERENCE or not group["lr"]
        floor = 0.0 if exact else torch.finfo(target.dtype).eps / float(group["lr"])
        turn_(
            vectors, update, dims, part, angle, zero_mean=group["zero_mean"], decay=group["update_norm_decay_factor"],
            eps=group["rotational_eps"], fixed_angle=group["fixed_angle"], floor=floor, grad=part["grad"], total=first.total, count=count,
        )  # fmt: skip
        if vectors is not target:
            target.copy_(vectors)
        if residual is not None:
            residual.copy_(vectors.sub_(target))
        if give_back is not None:
            give_back()

    def _decayed(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The gradient with the decay that the inner optimizer would add to it."""
        weights = param.to(work_type(param))
        if "residual" in self.state.get(param, {}):
            weights = weights + self.state[param]["residual"]
        decay = -group["weight_decay"] if group.get("maximize") else group["weight_decay"]
        assert param.grad is not None  # its caller has looked
        return (param.grad + decay * weights).to(param.dtype)

    def _mode(self, group: Mapping[str, Any]) -> str:
        """How to take a group's direction: `_FREE`, `_COUPLED` or `_DIFFERENCE`."""
        flags = tuple(value for value in group.values() if isinstance(value, bool))
        key = (id(group), bool(group.get("weight_decay", 0)), flags)
        if key not in self._modes:
            try:
                self._modes[key] = self._tried(group)
            except Exception:  # an optimizer that cannot be copied in this way: the difference always works
                self._modes[key] = _DIFFERENCE
        return self._modes[key]

    def _tried(self, group: Mapping[str, Any]) -> str:
        generator = torch.Generator().manual_seed(0)
        device = group["params"][0].device
        grads, one, other = (torch.randn(3, _TRIED, 4, 6, generator=generator, dtype=torch.float64).to(device)).unbind()
        decay = 0.1 if group.get("weight_decay", 0) else 0.0

        def steps(weights: Tensor, grads: Tensor) -> tuple[Tensor, list[Tensor]]:
            """What it does to weights of each step, and what it remembers in the end."""
            scratch = torch.nn.Parameter(weights[0].clone())
            probe = copy(self.inner)
            probe.state = defaultdict(dict)
            probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            probe.param_groups = [{**group, "params": [scratch], "lr": 0.1}]
            if decay:
                probe.param_groups[0]["weight_decay"] = decay
            taken = []
            for weight, grad in zip(weights, grads, strict=True):
                scratch.copy_(weight)
                scratch.grad = grad.clone()
                # Not probe.step: a scheduler may have put a method of the real optimizer there.
                type(self.inner).step(probe)
                taken.append(scratch.detach() - weight)
            held = [x for x in probe.state[scratch].values() if isinstance(x, Tensor) and x.shape == scratch.shape]
            return torch.stack(taken), held

        found, held = steps(one, grads)
        rounding = _ROUNDING * float(found.abs().max())

        def alike(others: list[Tensor]) -> bool:
            return all(torch.allclose(x, y, rtol=_ROUNDING, atol=rounding) for x, y in zip(held, others, strict=True))

        elsewhere, remembered = steps(other, grads)
        apart, between = found - elsewhere, one - other
        along = (apart * between).sum((1, 2), keepdim=True) / (between * between).sum((1, 2), keepdim=True)
        # An average of weights, say, must not see weights of zero.
        if float((apart - along * between).abs().max()) <= rounding and alike(remembered):
            return _FREE
        coupled = grads + (-decay if group.get("maximize") else decay) * one
        from_zero, remembered = steps(torch.zeros_like(one), coupled)
        if decay and float((from_zero - found).abs().max()) <= rounding and alike(remembered):
            return _COUPLED
        return _DIFFERENCE

    def _saved(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        # torch's optimizers would share their state with what they load.
        self.inner.load_state_dict({**state_dict, "state": deepcopy(state_dict["state"])})
        self._modes.clear()

    def _is_own(self, name: str) -> bool:
        return name in (*PER_VECTOR, "residual")
