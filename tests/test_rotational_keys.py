"""What a rotational optimizer is not told silently: keys of groups that are nearly its own, and that nothing rotates."""

import re
import warnings

import pytest
import torch

from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdamW, RotationalWrapper
from tests.rotational import CLASSES

NOTHING = r"No parameter of this \w+ rotates: only matrices .* under weight decay do, or under a rotation that is given\."


def matrix() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, 4))


@pytest.mark.parametrize("name", ["sgdm", "adamw", "lion", "wrapped adamw"])
def test_a_misspelt_key_is_refused_and_names_the_right_one(name):
    for key, near in (("weight_decy", "weight_decay"), ("neuron_dim", "neuron_dims"), ("per_neurons", "per_neuron")):
        with pytest.raises(InvalidArgument, match=re.escape(f"`{key}` is not a key of parameter groups, got 0.1; did you mean {near}?")):
            optimizer = CLASSES[name]([matrix()])
            optimizer.add_param_group({"params": [matrix()], key: 0.1})
        assert len(optimizer.param_groups) == 1
    if not name.startswith("wrapped"):
        with pytest.raises(InvalidArgument, match="did you mean rotational"):
            CLASSES[name]([{"params": [matrix()], "rotationl": False}])


def test_keys_of_the_callers_and_of_schedulers_are_theirs():
    optimizer = RotationalAdamW([{"params": [matrix()], "name": "body", "lr_scale": 2.0}], weight_decay=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    again = RotationalAdamW(optimizer.param_groups, weight_decay=0.1)
    assert again.param_groups[0]["name"] == "body" and "max_lr" in again.param_groups[0]


def test_nothing_that_rotates_is_told():
    vector = torch.nn.Parameter(torch.ones(3))
    for params, options in (([vector], {"weight_decay": 0.1}), ([matrix()], {"weight_decay": 0.0})):
        with pytest.warns(UserWarning, match=NOTHING):
            RotationalAdamW(params, **options)
    with pytest.warns(UserWarning, match=NOTHING):
        RotationalWrapper(torch.optim.SGD([vector], lr=0.1, weight_decay=0.1), rotation=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RotationalAdamW([matrix()], weight_decay=0.1)
        RotationalAdamW([matrix()], weight_decay=0.0, rotation=0.1)
        RotationalAdamW([vector, matrix()], weight_decay=0.1)
        RotationalAdamW([vector], weight_decay=0.1, rotational=False)
