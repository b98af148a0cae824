import importlib
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from threadpoolctl import threadpool_limits

if not torch.cuda.is_available():
    # Read when Triton is imported: its kernels then run on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
# Past jaxtyping's import hook: Triton reads a kernel's source and cannot use a wrapped function.
_finders = sys.meta_path[:]
sys.meta_path[:] = [finder for finder in _finders if not type(finder).__module__.startswith("jaxtyping")]
for _module in ("rwsim.walk.kernel", "rwsim.rotational.kernel"):
    importlib.import_module(_module)
sys.meta_path[:] = _finders

# A shell's background jobs ignore Ctrl-C, and so would every command that is interrupted here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Walks and matrices here are small: a second thread gains nothing and, beside other work, costs a lot. The variable is for processes
# that tests start, and for libraries that are not loaded yet.
torch.set_num_threads(1)
os.environ["OPENBLAS_NUM_THREADS"] = "1"
threadpool_limits(1, user_api="blas")

settings.register_profile("dev", deadline=None, max_examples=30)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _no_stray_random_numbers():
    """Tests use explicit generators: the global one must not move."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "a test drew from torch's global generator"


@pytest.fixture
def deterministic(monkeypatch):
    """Convolutions sum over a batch in one order from run to run."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The small sweep, uninterrupted."""
    from rwsim.sweeps.sweep import sweep
    from tests.sweeping import config

    return sweep(config(), tmp_path_factory.mktemp("whole")).data


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Sweeps in batches of one point."""
    from rwsim.sweeps import run

    plan = run.plan
    monkeypatch.setattr("rwsim.sweeps.sweep.plan", lambda *given: replace(plan(*given), batch=1))
