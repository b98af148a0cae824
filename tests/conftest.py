import os

import pytest
import torch
from hypothesis import settings

# The walks here are small: a second thread gains nothing and, beside other work, costs a lot.
torch.set_num_threads(1)

settings.register_profile("dev", deadline=None, max_examples=30)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _no_stray_random_numbers():
    """Tests use explicit generators: the global one must not move."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "a test drew from torch's global generator"
