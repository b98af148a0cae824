"""Where a sweep is walked, and what becomes of workers that die."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rwsim
from rwsim.errors import InvalidArgument, Unavailable
from rwsim.sweeps import run as running
from rwsim.sweeps.sweep import sweep
from tests.sweeping import config, same

pytest.importorskip("xarray", reason="the sweep extra is not installed")


class _Pool:
    """Anything with `submit` will do."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.submit = self.pool.submit


def test_any_executor(whole, tmp_path):
    pool = _Pool()
    assert same(sweep(config(), tmp_path / "a", executor=pool, workers=2).data, whole)
    pool.pool.shutdown()
    for chosen, message in (("thread", "must be one of local, processes, dask"), (3, "must have a method submit")):
        with pytest.raises(InvalidArgument, match=message):
            sweep(config(), tmp_path / f"b{chosen}", executor=chosen)
    with pytest.raises(InvalidArgument, match="`workers` must be at least 1"):
        sweep(config(), tmp_path / "c", executor="processes", workers=0)


_KILLER = """
import os, signal
from rwsim.sweeps.run import walk_task

def fatal(task):
    flag = os.environ["RWSIM_TEST_FLAG"]
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return walk_task(task)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_survive_the_death_of_one(whole, tmp_path, one_at_a_time, monkeypatch):
    """The worker is killed by its first task; this batch, and the one that waited and went down with it, are walked by another.

    One worker: each takes as long to begin as all of the walk.
    """
    (tmp_path / "killer.py").write_text(_KILLER)
    monkeypatch.setenv("RWSIM_TEST_FLAG", str(tmp_path / "killed"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(rwsim.__file__).parent.parent}")
    monkeypatch.syspath_prepend(str(tmp_path))
    import killer  # type: ignore[import-not-found]

    monkeypatch.setattr(running, "walk_task", killer.fatal)
    found = sweep(config(), tmp_path / "out", executor="processes", workers=1)
    assert (tmp_path / "killed").exists() and same(found.data, whole)


@pytest.mark.slow
def test_dask_survives_the_death_of_a_worker(whole, tmp_path, one_at_a_time):
    distributed = pytest.importorskip("distributed", reason="the cluster extra is not installed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        victims = list(client.run(os.getpid).values())

        def kill(done: int) -> None:
            if victims and done == 3:
                os.kill(victims.pop(), signal.SIGKILL)

        found = sweep(config(), tmp_path, executor="dask", scheduler=cluster.scheduler_address, workers=2, progress=kill)
    assert len(victims) == 1 and same(found.data, whole)


def test_a_task_that_keeps_killing_is_given_up(tmp_path):
    from concurrent.futures import BrokenExecutor, Future

    class Dying:
        def submit(self, *_):
            future: Future = Future()
            future.set_exception(BrokenExecutor("dead"))
            return future

    with pytest.raises(rwsim.errors.RwsimError, match="a worker ended 3 times at "):
        sweep(config(), tmp_path, executor=Dying())


def test_a_plan_tells_what_it_takes(tmp_path, monkeypatch):
    plans = []
    sweep(config(), tmp_path / "a", planned=lambda plan, kept: plans.append(plan))
    assert "16 points, 5.1e+04 neuron-steps: about 0:00:01 (blocked engine on cpu)" in str(plans[0])
    monkeypatch.setattr(running, "_free", lambda kind: 1e5)
    sweep(config(), tmp_path / "b", planned=lambda plan, kept: plans.append(plan))
    assert plans[1].batch < plans[0].batch
    monkeypatch.setattr(running, "_free", lambda kind: 1e3)
    with pytest.raises(InvalidArgument, match=r"must let one point fit into memory: .* take fewer neurons"):
        sweep(config(), tmp_path / "c")


def test_an_engine_that_does_not_carry_the_sweep_is_named(tmp_path):
    with pytest.raises(Unavailable, match="`engine` blocked does not carry"):
        sweep(config(engine="blocked", gradient="faithful"), tmp_path)


def test_xarray_is_missed_before_the_walk(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(Unavailable, match=r"pip install 'rwsim\[sweep\]'"):
        sweep(config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
