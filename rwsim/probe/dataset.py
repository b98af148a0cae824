"""A probe's records as labelled data."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rwsim.probe.quantities import QUANTITIES
from rwsim.probe.reading import PREDICTIONS, TRANSIENTS, Reading
from rwsim.probe.transient import Transients
from rwsim.sweeps.result import need_xarray

if TYPE_CHECKING:
    import xarray


def dataset(readings: Sequence[Reading], transients: Transients) -> "xarray.Dataset":
    """Dimensions ``step``, ``layer`` and ``neuron``.

    Layers have different numbers of neurons, so ``neuron`` runs over all of them, one layer after the other; coordinates say to which
    layer each belongs (``neuron_layer``, an index into ``layer``) and which it is there (``neuron_index``). Averages over a layer's neurons
    have its quantity's name, single neurons ``neuron_`` before it.

    Raises:
        Unavailable: xarray is not here.
    """
    need_xarray("to_xarray")
    import xarray as xr

    steps = readings[0].steps
    layers = [reading.layer.name for reading in readings]
    sizes = [len(reading.layer.rows) for reading in readings]
    some = len(steps) > 0
    variables: dict[str, Any] = {}

    def over_layers(name: str, columns: Sequence[np.ndarray], units: str, what: str) -> None:
        table = np.stack(columns, 1) if some else np.empty((0, len(layers)))
        variables[name] = (("step", "layer"), table, {"units": units, "long_name": what})

    for name, (average, units, what) in QUANTITIES.items():
        said = {"rms": "root mean square over neurons: ", "mean": "mean over neurons: "}[average] + what
        over_layers(name, [reading.measured[name] for reading in readings] if some else [], units, said)
        single = np.concatenate([reading.found[name] for reading in readings], 1) if some else np.empty((0, sum(sizes)))
        variables[f"neuron_{name}"] = (("step", "neuron"), single.astype(np.float32), {"units": units, "long_name": what})
    for name, (units, what) in PREDICTIONS.items():
        over_layers(name, [reading.predicted[name] for reading in readings] if some else [], units, what)
    tracks: dict[str, list[np.ndarray]] = {name: [] for name in TRANSIENTS}
    for reading in readings if some else ():
        for kind, effective in (("transient", False), ("transient_effective", True)):
            for name, values in zip(("norm", "rotation"), reading.transient(transients, effective), strict=True):
                tracks[f"{kind}_{name}"].append(values[steps - 1])
    for name, (units, what) in TRANSIENTS.items():
        over_layers(name, tracks[name], units, what)
    coordinates: dict[str, Any] = {
        "step": ("step", steps.astype(np.int32), {"long_name": "number of the step"}),
        "layer": layers,
        "fan_in": ("layer", np.array([reading.layer.fan_in for reading in readings], dtype=np.int32)),
        "neuron_layer": ("neuron", np.repeat(np.arange(len(layers), dtype=np.int32), sizes), {"long_name": "index of the neuron's layer"}),
        "neuron_index": ("neuron", np.concatenate([reading.layer.rows for reading in readings]).astype(np.int32)),
    }
    from rwsim import __version__

    rules = [reading.theory.rule.name if reading.theory else "" for reading in readings]
    coordinates["rule"] = ("layer", rules)
    return xr.Dataset(variables, coordinates, {"title": "rwsim probe", "rwsim": __version__})
