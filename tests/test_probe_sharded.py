"""The probe on several processes: each records what one process alone would, and the first one writes."""

import json
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rwsim import DynamicsProbe
from rwsim.probe import CSVWriter
from rwsim.probe.quantities import QUANTITIES
from tests.forked import together
from tests.probing import Lion
from tests.sharding import LAYOUTS, Layout, Net, data, train, two_dimensional

STEPS = 4
# foreach does not take plain and sharded parameters together.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgdm": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False),
    "adam_l2": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, foreach=False),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=1.0),
}


def watched(layout: Layout | None, name: str, **options: Any) -> DynamicsProbe:
    """A probe on training, on one process alone or on all of them."""
    model: Any = Net(torch.float64, "cpu")
    split = False
    if layout is not None:
        place, split = layout
        model = place(model, "cpu")
    optimizer = OPTIMIZERS[name](model.parameters())
    with DynamicsProbe(model, optimizer, every=1, flush=3, **options) as probe:
        train(model, optimizer, data(torch.float64, "cpu", STEPS), split)
    return probe


def equal(layout: Layout, name: str, **options: Any) -> None:
    """All quantities of all neurons are those of one process."""
    mine, alone = watched(layout, name, **options), watched(None, name, **options)
    assert [layer.name for layer in mine.layers] == [layer.name for layer in alone.layers]
    assert mine.steps == alone.steps == [1, 2, 3, 4]
    for layer in alone.layers:
        one, other = mine.read(layer.name).found, alone.read(layer.name).found
        for key in QUANTITIES:
            # Angles near pi/2 are sums of rounding.
            np.testing.assert_allclose(one[key], other[key], rtol=1e-9, atol=1e-9, err_msg=f"{layer.name} {key}")


def broken(rank: int, folder: str) -> None:
    """The negative control: sums of one process's shards are not those of whole vectors."""
    from rwsim.rotational.sharded import Shards

    kept = Shards.join
    Shards.join = lambda self, own: own  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError):
            equal(LAYOUTS["fsdp columns"], "adamw")
    finally:
        Shards.join = kept  # type: ignore[method-assign]


def writes(rank: int, folder: str) -> None:
    """The first process writes, once; any one alone can read."""
    path = Path(folder) / "records.csv"
    writer = CSVWriter(path, resume=True)
    probe = watched(LAYOUTS["fsdp rows"], "adamw", writers=writer)
    dist.barrier()
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + STEPS * len(probe.layers)
    assert (writer._file is None) and sum(line.startswith("1,") for line in lines) == len(probe.layers)
    if rank == 1:
        assert probe.to_xarray().sizes["step"] == STEPS


def alike(layout: Layout, name: str, options: dict[str, Any], rank: int, folder: str) -> None:
    equal(layout, name, **options)


Case = Callable[[int, str], None]
TWO: dict[str, Case] = {f"{where}, {name}": partial(alike, LAYOUTS[where], name, {}) for where in LAYOUTS for name in ("sgdm", "adamw")}
for where in ("fsdp rows", "fsdp columns"):
    for other in ("adam_l2", "lion"):
        TWO[f"{where}, {other}"] = partial(alike, LAYOUTS[where], other, {})
    TWO[f"{where}, whole tensors"] = partial(alike, LAYOUTS[where], "adamw", {"per_neuron": False})
    TWO[f"{where}, some neurons"] = partial(alike, LAYOUTS[where], "adamw", {"neurons": 3})
TWO |= {"rejects sums of one shard": broken, "the first process writes": writes}
FOUR: dict[str, Case] = {"fsdp and tensor parallel": partial(alike, (two_dimensional, False), "adamw", {})}


def worker(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    said: dict[str, str] = {}
    for name, case in (TWO if world == 2 else FOUR).items():
        try:
            case(rank, folder)
            said[name] = ""
        except BaseException:
            said[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(said))
        failed: list[Any] = [None] * world
        dist.all_gather_object(failed, bool(said[name]))
        # Out of step nothing more can be said.
        if len(set(failed)) > 1:
            break
    dist.destroy_process_group()


def outcomes(world: int, folder: Path) -> dict[str, list[str]]:
    """Case -> what each process said of it: empty if it holds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = together([f"from {__name__} import worker; worker{(rank, world, port, str(folder))}" for rank in range(world)], 240)
    found: list[dict[str, str]] = []
    for rank in range(world):
        path = folder / f"{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    names = TWO if world == 2 else FOUR
    return {name: [one.get(name, f"not run: {words}") for one, words in zip(found, said, strict=True)] for name in names}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return outcomes(2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", TWO)
def test_two_processes(case, two):
    assert not any(two[case]), "\n".join(two[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_processes(case, tmp_path):
    found = outcomes(4, tmp_path)
    assert not any(found[case]), "\n".join(found[case])
