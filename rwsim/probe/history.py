"""What a probe remembers: sums of measured steps, hyperparameters of every step, and which steps a scaler skipped.

Steps may be counted on the device only (a fused optimizer under torch.amp.GradScaler skips one without telling the host), so what is
new waits there and is settled in one go.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwsim.errors import InvalidArgument
from rwsim.probe.layers import Layer
from rwsim.probe.measure import COLUMNS, Bundle

# Hyperparameters that are written down where a group has them.
NAMES = ("lr", "weight_decay", "momentum", "dampening", "betas", "nu", "max_lr", "rotation")
Values = tuple[Any, ...]
# Types of hyperparameters that cannot change in place.
_FIXED = {int, float, str, bool, type(None)}


class History:
    """Records of one run, in calls of the optimizer's step until they are settled, then in steps.

    Attributes:
        calls: How often the optimizer's step was called.
        skipped: Calls that took no step.
        steps: Numbers of the measured steps, 1 for the first that the probe saw.
        sums: Of each layer, one array (column, neuron) a measured step.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.calls = 0
        self.skipped: list[int] = []
        self.steps: list[int] = []
        self.sums: dict[str, list[np.ndarray]] = {layer.name: [] for layer in layers}
        self._hyper: list[list[tuple[int, Values]]] = []
        self._given: list[Values] = []
        self._read: dict[int, int] = {}
        self._flags: list[tuple[int, Tensor]] = []
        self._waiting: list[tuple[int, list[Tensor]]] = []

    def call(self, groups: Sequence[Mapping[str, Any]], found_inf: Tensor | None) -> int:
        """Take notice of a call: its hyperparameters, and a flag on the device that says whether it will be skipped."""
        self.calls += 1
        for i, group in enumerate(groups):
            if i == len(self._hyper):
                self._hyper.append([])
                self._given.append(())
            # Most steps change nothing, and every one passes here.
            given = tuple([group.get(name) for name in NAMES])
            fixed = all(map(_is_fixed, given))
            if fixed and given == self._given[i]:
                continue
            self._given[i] = given if fixed else ()
            values = tuple([_kept(value) for value in given])
            log = self._hyper[i]
            # A tensor on a device cannot be compared without waiting for it.
            if not log or any(map(_on_device, values)) or log[-1][1] != values:
                log.append((self.calls, values))
        if found_inf is not None:
            self._flags.append((self.calls, found_inf))
        return self.calls

    def add(self, call: int, sums: list[Tensor]) -> None:
        """Sums of a measured call, one tensor a bundle, on their devices."""
        self._waiting.append((call, sums))

    @property
    def waiting(self) -> int:
        """Measured calls that are not settled."""
        return len(self._waiting)

    def settle(self, bundles: Sequence[Bundle]) -> None:
        """Bring what waits on devices here. This waits for them."""
        if self._flags:
            flags = torch.stack([flag.detach().reshape(()).float() for _, flag in self._flags]).cpu()
            self.skipped += [call for (call, _), flag in zip(self._flags, flags.tolist(), strict=True) if flag]
            self._flags = []
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        skipped = set(self.skipped)
        taken = [i for i, (call, _) in enumerate(waiting) if call not in skipped]
        new = {layer.name: np.empty(0) for layer in self.layers}
        for b, bundle in enumerate(bundles):
            every = torch.stack([sums[b] for _, sums in waiting]).cpu().numpy()[taken]
            start = 0
            for layer, first, last in bundle.spans:
                if not new[layer.name].size:
                    new[layer.name] = np.empty((len(taken), len(COLUMNS), len(layer.rows)), every.dtype)
                new[layer.name][:, :, first:last] = every[:, :, start : start + last - first]
                start += last - first
        for name, sums in new.items():
            self.sums[name] += list(sums)
        self.steps += [waiting[i][0] - int(np.searchsorted(self.skipped, waiting[i][0])) for i in taken]

    @property
    def length(self) -> int:
        """Steps so far, skipped ones aside."""
        return self.calls - len(self.skipped)

    def table(self, layer: Layer, first: int = 0, last: int | None = None) -> np.ndarray:
        """Sums of a layer at measured steps, float64, shape (time, column, neuron)."""
        found = self.sums[layer.name][first:last]
        return np.array(found, dtype=np.float64) if found else np.empty((0, len(COLUMNS), len(layer.rows)))

    def hyper(self, group: int) -> dict[str, np.ndarray]:
        """Hyperparameters of a group at every step, shape (time,) or (time, 2); only those that it has, as numbers."""
        log = self._hyper[group] if group < len(self._hyper) else []
        for i in range(self._read.get(group, 0), len(log)):
            log[i] = log[i][0], tuple([_number(one) for one in log[i][1]])
        self._read[group] = len(log)
        taken = np.setdiff1d(np.arange(1, self.calls + 1), self.skipped)
        if not log:
            return {}
        entry = np.searchsorted([call for call, _ in log], taken, side="right") - 1
        found = {}
        for i, name in enumerate(NAMES):
            values = [entry_values[i] for _, entry_values in log]
            if values[0] is not None and not any(isinstance(value, str) for value in values):
                # A group that came later has no values before.
                column = np.array([np.full_like(np.asarray(values[0], dtype=float), np.nan), *values], dtype=float)
                found[name] = column[entry + 1]
        return found

    def state_dict(self) -> dict[str, Any]:
        """All of it, settled, in types that `torch.load` takes with ``weights_only=True``."""
        for i in range(len(self._hyper)):
            self.hyper(i)
        # In the precision that they were taken in.
        sums = {name: torch.from_numpy(np.array(found)) for name, found in self.sums.items()}
        hyper = [[[call, list(values)] for call, values in log] for log in self._hyper]
        counts = {"calls": self.calls, "skipped": list(self.skipped), "steps": list(self.steps)}
        return {**counts, "hyper": hyper, "columns": list(COLUMNS), "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            InvalidArgument: Of other layers, or of another version.
        """
        sums = state["sums"]
        if list(state["columns"]) != list(COLUMNS):
            raise InvalidArgument("state", "must be of this version of rwsim", state["columns"])
        for layer in self.layers:
            if layer.name not in sums or sums[layer.name].shape[1:] not in ((), (len(COLUMNS), len(layer.rows))):
                remedy = "make the probe as it was made then: the same model, layers and neurons"
                raise InvalidArgument("state", f"must hold {len(layer.rows)} vectors of {layer.name}", sorted(sums), remedy)
        self.calls, self.skipped, self.steps = state["calls"], list(state["skipped"]), list(state["steps"])
        self._hyper = [[(call, _values(values)) for call, values in log] for log in state["hyper"]]
        self._given = [() for _ in self._hyper]
        self.sums = {layer.name: list(sums[layer.name].numpy().copy()) for layer in self.layers}
        self._flags, self._waiting, self._read = [], [], {}


def _values(values: Sequence[Any]) -> Values:
    return tuple([tuple(one) if isinstance(one, list) else one for one in values])


def _is_fixed(value: Any) -> bool:
    """Whether a hyperparameter is nothing that could change in place."""
    return type(value) in _FIXED or (type(value) is tuple and all([type(one) in _FIXED for one in value]))


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now; of a tensor on a device a copy."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else value.detach().clone()
    if isinstance(value, (tuple, list)):
        return tuple([_kept(one) for one in value])
    return value if isinstance(value, (int, float, str)) else None


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(isinstance(one, Tensor) for one in value))


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([_number(one) for one in value])
    return float(value) if isinstance(value, Tensor) else value
