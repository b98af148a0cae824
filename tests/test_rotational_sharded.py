"""Sharded parameters: two or four processes take the steps that one takes, whatever lies where; checkpoints move between shardings.

The cases run in processes of their own, all of one kind in one spawn; the tests here report them by name.
"""

import json
import math
import os
import re
import socket
import threading
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rwsim
from rwsim.rotational.place import shards_of
from rwsim.rotational.rotate import centre_, turn_
from tests.forked import together
from tests.rotational import seeded
from tests.sharded_cases import CASES, FOUR

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# Of a whole spawn; a collective that waits for a process that has failed gives up before.
SPAWN, COLLECTIVE = 240, 30


# Processes.


def worker(rank: int, world: int, port: int, backend: str, folder: str) -> None:
    """All cases of a world in turn; what each came to goes to a file of this process."""
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    outcomes: dict[str, str] = {}
    more: dict[str, Any] = {"device_id": torch.device(device)} if backend == "nccl" else {}
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=COLLECTIVE), **more)
    for name, case in (CASES if world == 2 else FOUR).items():
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            case(device)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
        outcomes[name + " (seconds)"] = f"{time.perf_counter() - began:.2f}"
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
        # A process that failed alone has left the others waiting: with them out of step nothing more can be said.
        failed: list[Any] = [None] * world
        dist.all_gather_object(failed, bool(outcomes[name]))
        if len(set(failed)) > 1:
            break
    dist.destroy_process_group()


def outcomes(world: int, backend: str, folder: Path) -> dict[str, list[str]]:
    """Case -> what each process said of it: empty if it holds."""
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"torch without {backend}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = together([f"from {__name__} import worker; worker{(rank, world, port, backend, str(folder))}" for rank in range(world)], SPAWN)
    found: list[dict[str, str]] = []
    for rank in range(world):
        path = folder / f"{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    names = CASES if world == 2 else FOUR
    return {name: [one.get(name, f"not run: {words}") for one, words in zip(found, said, strict=True)] for name in names}


def once(world: int, backend: str, folders: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Outcomes of one spawn for all of pytest-xdist's workers, among which the cases may be spread."""
    base = folders.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"sharded-{backend}-{world}"
    folder.mkdir(exist_ok=True)
    kept = folder / "outcomes.json"
    with open(folder / "lock", "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(outcomes(world, backend, folder)))
        return json.loads(kept.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return once(2, "gloo", tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return once(4, "gloo", tmp_path_factory)


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    return once(2, "nccl", tmp_path_factory)


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, two):
    assert not any(two[case]), "\n".join(two[case])


@pytest.mark.parametrize("case", FOUR)
def test_four_processes(case, four):
    assert not any(four[case]), "\n".join(four[case])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("case", CASES)
def test_two_gpus(case, two_gpus):
    assert not any(two_gpus[case]), "\n".join(two_gpus[case])


# Without processes.


class Four:
    """Adds up what four threads bring, in turn."""

    def __init__(self) -> None:
        self.barrier, self.parts = threading.Barrier(4, timeout=30), [torch.empty(0)] * 4

    def total(self, i: int, sums: Tensor) -> Tensor:
        self.parts[i] = sums
        self.barrier.wait()
        added = torch.stack(self.parts).sum(0)
        self.barrier.wait()
        return added


@pytest.mark.parametrize("zero_mean", [True, False])
def test_case_27_four_shards_of_one_row(zero_mean):
    """Of Algorithm 1 alone: four shards of uneven length turn as the row does, and their norm is the row's."""
    generator = seeded(6)
    row, update, grad = (torch.randn(1, 11, generator=generator, dtype=torch.float64) for _ in range(3))
    given = {"zero_mean": zero_mean, "decay": 0.9, "eps": 1e-8, "fixed_angle": False}

    def state(norm: Tensor) -> dict[str, Tensor]:
        return {"norm": norm, "update_norm_sq": torch.zeros_like(norm), "hits": torch.zeros_like(norm)}

    shards, four = [part.clone() for part in row.tensor_split(4, 1)], Four()
    norm = row.norm(dim=1, keepdim=True)
    centre_(row, (1,))
    turn_(row, update.clone(), (1,), state(norm), 0.1, grad=grad, **given)
    norms = [torch.empty(0)] * 4

    def run(i: int, part: Tensor) -> None:
        total = partial(four.total, i)
        norms[i] = centre_(part, (1,), total, 11)
        pieces = (x.tensor_split(4, 1)[i].clone() for x in (update, grad))
        turn_(part, next(pieces), (1,), state(norms[i]), 0.1, grad=next(pieces), total=total, count=11, **given)

    threads = [threading.Thread(target=run, args=(i, part)) for i, part in enumerate(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(torch.cat(shards, 1), row, rtol=0, atol=1e-14)
    assert all(math.isclose(float(one), float(norm), rel_tol=1e-14) for one in norms)


def test_an_exported_file_has_no_distributed_code_and_refuses_shards():
    from rwsim.export.source import body, subject  # not in every process

    text = body(subject("adamw", "paper", None))
    assert "distributed" not in text
    scope: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported", "exec"), scope)
    param = nn.Parameter(torch.ones(4, 4))
    param.device_mesh = None  # what a DTensor is known by
    with pytest.raises(ValueError, match="`params` must be whole on every process"):
        scope["RotationalAdamW"]([param], weight_decay=0.1)


def test_whole_parameters_need_no_distributed_code():
    """One module imports it, and only functions that have found a DTensor import that module."""
    root = Path(rwsim.__file__).parent
    found = [path.name for path in root.rglob("*.py") if re.search(r"^(import|from) torch\.distributed", path.read_text(), re.M)]
    assert found == ["sharded.py"]
    users = [path.name for path in root.rglob("*.py") if re.search(r"^(import|from) rwsim\.rotational\.sharded", path.read_text(), re.M)]
    assert not users
    assert shards_of(nn.Parameter(torch.ones(2, 2)), torch.Size([2, 2]), (1,)) is None
