"""`rwsim.DynamicsProbe`: hang it on a run, read what the weights do beside what theory says."""

import math
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rwsim.errors import InvalidArgument, RwsimError
from rwsim.optimizers import UpdateRule, find_rule
from rwsim.plan import torch_rule
from rwsim.probe.history import History
from rwsim.probe.layers import Layer, watched
from rwsim.probe.measure import Argument, bundled
from rwsim.probe.predict import Theory
from rwsim.probe.reading import Reading
from rwsim.probe.transient import Transients
from rwsim.probe.writers import Writer, is_first_process
from rwsim.rotational.optimizer import RotationalOptimizer
from rwsim.rotational.wrapper import RotationalWrapper
from rwsim.theory._cache import cached

if TYPE_CHECKING:
    import xarray

    from rwsim.probe.diagnose import Diagnosis

# (until, every): every so many steps up to that one; None: to the end.
Intervals = int | Sequence[tuple[int | None, int]]


class DynamicsProbe:
    """Watches what an optimizer's steps do to a model's weights, without changing a bit of the run.

    Hooked on the optimizer's step, it measures every `every`-th (the 1st, the 11th, ...), by layer and by neuron: weight norm, angle of the
    step, relative update, size of the gradient part, gradient norm, the gradient's angles to weights and momentum, the gradient over the
    root of its second moment, and the radial part lambda_u. Beside each goes what theory says (see `rwsim.probe.predict`). Sums are
    taken on the device and brought over many at a time.

    Under gradient accumulation it sees one step. Under torch.amp.GradScaler it takes unscaled gradients and does not count skipped steps.
    Sharded parameters have their true norms; every process records the same, and the first one writes. A step that is replayed from
    a CUDA graph calls no hook: where `due` says that the next is to be measured take it without the graph, and tell `replayed` of others.

    Args:
        model: Whose parameters.
        optimizer: That takes the steps: any torch.optim.Optimizer that needs no closure.
        every: Measure every so many steps; or pairs (until, every), the last until None: ``[(100, 1), (None, 20)]``.
        layers: Names or patterns of parameters, compiled regular expressions, or a function of name and parameter; default: all of two
            or more dimensions that the optimizer trains.
        neurons: At most so many vectors of each layer, the same in every run; None: all. They are kept, 56 bytes each a measured step.
        per_neuron: A vector is a neuron's weights; False: the whole tensor.
        special: Pattern of names -> ``neuron_dims``, ``blocks``, ``per_neuron``, as of `rwsim.rotational.parameter_groups`.
        rule: Whose theory: a rule or its name; default: by the optimizer's class.
        writers: Where records go as they come; see `rwsim.probe.writers`.
        flush: Measured steps that wait on the device at most.
        average: Measured steps of the running averages that predictions use.

    Attributes:
        layers: What is watched.
        notes: Why a layer has no prediction, by name.

    Raises:
        InvalidArgument: An optimizer that needs a closure; nothing to watch; a value out of range.

    Example:
        >>> model = nn.Linear(16, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> with DynamicsProbe(model, optimizer, every=2) as probe:
        ...     for _ in range(4):
        ...         model(torch.ones(8, 16)).square().sum().backward()
        ...         optimizer.step()
        >>> probe.steps
        [1, 3]
        >>> probe.read("weight").measured["norm"].shape
        (2,)
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, every: Intervals = 10, *, layers: Any = None,
        neurons: int | None = None, per_neuron: bool = True, special: Mapping[str, Mapping[str, Any]] | None = None,
        rule: str | type[UpdateRule] | None = None, writers: Writer | Sequence[Writer] = (), flush: int = 20, average: float | int = 50,
    ) -> None:  # fmt: skip
        needed = signature(type(optimizer).step).parameters.get("closure")
        if needed is not None and needed.default is Parameter.empty:
            remedy = "its steps evaluate the loss several times, at weights of their own"
            raise InvalidArgument("optimizer", "must take its step without a closure", type(optimizer).__name__, remedy)
        for name, value, least in (("neurons", neurons, 1), ("flush", flush, 1), ("average", average, 1)):
            if value is not None and not least <= value < math.inf:
                raise InvalidArgument(name, f"must be at least {least}", value)
        self.optimizer, self.average = optimizer, float(average)
        self._intervals = _intervals(every)
        self._flush = flush
        self.layers = watched(model, optimizer, layers, neurons, per_neuron, special or {})
        self.notes: dict[str, str] = {}
        self._theories = {layer.name: self._theory(layer, rule) for layer in self.layers}
        arguments: dict[int, Argument] = {}
        for layer in self.layers:
            theory = self._theories[layer.name]
            if theory is not None and theory.kind == "sign" and not self._turns(layer):
                arguments[layer.group] = _argument(theory)
        coupled = {layer.group for layer in self.layers if (one := self._theories[layer.name]) is not None and one.kind == "coupled"}
        self._bundles = bundled(self.layers, optimizer, arguments, coupled)
        self._history = History(self.layers)
        self._transients = Transients()
        self._readings: dict[str, Reading] = {}
        self.writers = [writers] if isinstance(writers, Writer) else list(writers)
        self._written: list[Reading | None] = [None] * len(self.layers)
        self._due = False
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    # Hooks.

    @property
    def due(self) -> bool:
        """Whether the step after those so far is to be measured."""
        return self._is_due(self._history.calls + 1)

    def replayed(self) -> None:
        """Count a step that a CUDA graph took. One that was due is missing in the records."""
        self._history.call(self._groups(), getattr(self.optimizer, "found_inf", None))

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # nothing is computed: the step is taken when it is replayed
        self._due = self.due
        self._history.call(self._groups(), getattr(optimizer, "found_inf", None))
        if self._due:
            closure = _closure(args, kwargs)
            for bundle in self._bundles:
                bundle.before(getattr(optimizer, "grad_scale", None), closure)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._due:
            return
        self._due = False
        closure = _closure(args, kwargs)
        self._history.add(self._history.calls, [bundle.after(getattr(optimizer, "grad_scale", None), closure) for bundle in self._bundles])
        if self._history.waiting >= self._flush:
            self.flush()

    def _is_due(self, call: int) -> bool:
        start = 0
        for until, every in self._intervals:
            if until is None or call <= until:
                return (call - start - 1) % every == 0
            start = until
        return False

    def _groups(self) -> Sequence[Mapping[str, Any]]:
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, RotationalOptimizer):
            return groups
        turning = {layer.group for layer in self.layers if self._turns(layer)}
        return [{**group, "rotation": self.optimizer.rotation(group) if i in turning else None} for i, group in enumerate(groups)]

    def _turns(self, layer: Layer) -> bool:
        optimizer = self.optimizer
        return isinstance(optimizer, RotationalOptimizer) and optimizer.is_rotational(optimizer.param_groups[layer.group], layer.param)

    def _theory(self, layer: Layer, rule: str | type[UpdateRule] | None) -> Theory | None:
        """Of a layer's group, or None with a note."""
        optimizer, group = self.optimizer, self.optimizer.param_groups[layer.group]
        if rule is not None:
            return _checked(find_rule(rule), group)
        try:
            inner = optimizer.inner if isinstance(optimizer, RotationalWrapper) else optimizer
            found = inner.rule_of(group) if isinstance(inner, RotationalOptimizer) else torch_rule(inner, group)
            return _checked(found, group)
        except RwsimError as error:
            self.notes[layer.name] = f"no prediction for {type(optimizer).__name__}: {error} Another rule can be given by `rule`."
            return None

    # Reading.

    @property
    def steps(self) -> list[int]:
        """Numbers of the measured steps that have been brought over; the first step that the probe saw is 1."""
        self.flush()
        return list(self._history.steps)

    def read(self, name: str) -> Reading:
        """One layer: ``.measured``, ``.predicted`` (arrays over measured steps), ``.found`` (by neuron), ``.transient``."""
        self.flush()
        return self._reading(name)

    def _reading(self, name: str) -> Reading:
        if name not in self._theories:
            raise InvalidArgument("name", f"must be one of {', '.join(self._theories)}", name)
        if name not in self._readings:
            self._readings[name] = self._reading_of(next(layer for layer in self.layers if layer.name == name))
        return self._readings[name]

    def _reading_of(self, layer: Layer, before: Reading | None = None) -> Reading:
        sign = -1.0 if self.optimizer.param_groups[layer.group].get("maximize") else 1.0
        return Reading(self._history, layer, self._theories[layer.name], self._turns(layer), self.average, sign, before)

    def to_xarray(self) -> "xarray.Dataset":
        """All records: dimensions (step, layer), by neuron (step, neuron); see `rwsim.probe.dataset`."""
        from rwsim.probe.dataset import dataset

        self.flush()
        return dataset([self._reading(layer.name) for layer in self.layers], self._transients)

    def to_netcdf(self, path: str | Path) -> None:
        """`to_xarray` as a NetCDF file."""
        from rwsim.sweeps.result import write_netcdf

        write_netcdf(self.to_xarray(), Path(path))

    def diagnose(self, after: int | None = None) -> "Diagnosis":
        """What the records say, in plain words; see `rwsim.probe.diagnose`."""
        from rwsim.probe.diagnose import diagnosis

        self.flush()
        return diagnosis([self._reading(layer.name) for layer in self.layers], self._transients, after, self.notes)

    # Keeping.

    def flush(self) -> None:
        """Bring over what waits on devices, and write it."""
        if self._history.waiting:
            self._readings = {}
        self._history.settle(self._bundles)
        if self.writers and is_first_process():
            # What has been written is not looked at again.
            news = [self._reading_of(layer, before) for layer, before in zip(self.layers, self._written, strict=True)]
            if len(news[0].steps):
                for writer in self.writers:
                    writer.write(news)
                self._written = list(news)

    def close(self) -> None:
        """Remove the hooks and write the rest; what was recorded can still be read."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.flush()
        for writer in self.writers:
            writer.close()

    def __enter__(self) -> "DynamicsProbe":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Records so far, for a checkpoint; `torch.load` takes it with ``weights_only=True``."""
        self.flush()
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: a resumed training then has the records of one that was not interrupted.

        Raises:
            InvalidArgument: The state of another probe.
        """
        self._history.load_state_dict(state)
        self._readings = {}
        if self.writers and is_first_process():
            self._written = [self._reading_of(layer) for layer in self.layers]
            for writer in self.writers:
                writer.resume(self._history.steps[-1] if self._history.steps else 0)


@cached
def _theory_of(rule: type[UpdateRule]) -> Theory:
    """A rule's algebra takes a tenth of a second, and layers share theirs."""
    return Theory(rule)


def _checked(rule: type[UpdateRule], group: Mapping[str, Any]) -> Theory:
    theory = _theory_of(rule)
    theory.flat({name: 0.5 for name in group})
    return theory


def _argument(theory: Theory) -> Argument:
    known: dict[Any, tuple[float, float, float, float]] = {}

    def argument(group: Mapping[str, Any]) -> tuple[float, float, float, float]:
        hyper = {name: group[name] for name in theory.rule.hyper if name in group and name not in ("lr", "weight_decay")}
        # Where the optimizer maximizes, its buffer is of gradients turned round.
        sign = -1 if group.get("maximize") else 1
        key = repr((hyper, sign))
        if key not in known:
            one, two, three, four = (float(x.ravel()[0]) for x in theory.argument({"lr": 1.0, "weight_decay": 0.0, **hyper}))
            known[key] = one, sign * two, three, sign * four
        return known[key]

    return argument


def _closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def _intervals(every: Intervals) -> list[tuple[int | None, int]]:
    pairs: list[Any] = [(None, every)] if isinstance(every, int) else [tuple(pair) for pair in every]
    good = bool(pairs) and all(len(pair) == 2 and isinstance(pair[1], int) and pair[1] >= 1 for pair in pairs)
    if good:
        *ends, last = (pair[0] for pair in pairs)
        good = last is None and all(isinstance(end, int) for end in ends)
        good = good and all(end > before for before, end in zip([0, *ends], ends, strict=False))
    if not good:
        rule = "must be a number of steps of at least 1, or pairs (until, every), the last until None"
        raise InvalidArgument("every", rule, every, "give 10, or [(100, 1), (None, 20)]")
    return [(pair[0], pair[1]) for pair in pairs]
