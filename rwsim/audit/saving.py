"""Checks of the lifecycle, first half: state that is saved, loaded, copied, and who owns it.

Each is a program of its own (see `rwsim.audit.bench`): its source is the snippet of its finding.
"""

import copy
import io
import pickle

import torch

from rwsim.audit.bench import Check, drive, feed, gap, resumed_from, started, values, weights


def resumed(make, seed, dtype):
    """Five steps, save, load into a fresh optimizer of fresh parameters, ten more: as if nothing had happened."""
    straight, _ = started(make, seed, dtype, 15)

    before, optimizer = started(make, seed, dtype, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    return gap(resumed_from(make, before, saved, seed), straight)


def resumed_with_another_lr(make, seed, dtype):
    """The same, but the fresh optimizer was built with another learning rate: the saved one counts."""
    straight, _ = started(make, seed, dtype, 15)

    before, optimizer = started(make, seed, dtype, 5)
    return gap(resumed_from(make, before, copy.deepcopy(optimizer.state_dict()), seed, lr=0.01), straight)


def resumed_from_file(make, seed, dtype):
    """The same through torch.save and torch.load."""
    straight, _ = started(make, seed, dtype, 15)

    before, optimizer = started(make, seed, dtype, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return gap(resumed_from(make, before, torch.load(file, weights_only=True), seed), straight)


def saved_to_file(make, seed, dtype):
    """torch.save takes the state."""
    _, optimizer = started(make, seed, dtype, 3)
    torch.save(optimizer.state_dict(), io.BytesIO())
    return 0.0


def loaded_weights_only(make, seed, dtype):
    """The saved state holds nothing but what torch.load(weights_only=True) reads: tensors, numbers, text, lists and dicts."""
    _, optimizer = started(make, seed, dtype, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)
    return 0.0


def resumed_before_the_first_step(make, seed, dtype):
    """State saved before the first step loads too."""
    straight, _ = started(make, seed, dtype, 5)

    saved = copy.deepcopy(make(weights(seed, dtype)).state_dict())
    after = weights(seed, dtype)
    fresh = make(after)
    fresh.load_state_dict(saved)
    drive(fresh, after, range(5), seed)
    return gap(after, straight)


def rewound(make, seed, dtype):
    """Loading state into the very optimizer that saved it, five steps later: nothing of those steps stays."""
    straight, _ = started(make, seed, dtype, 10)

    params, optimizer = started(make, seed, dtype, 5)
    saved, kept = copy.deepcopy(optimizer.state_dict()), values(params)
    drive(optimizer, params, range(20, 25), seed)
    optimizer.load_state_dict(saved)
    for param, value in zip(params, kept, strict=True):
        param.data.copy_(value)
    drive(optimizer, params, range(5, 10), seed)
    return gap(params, straight)


def loaded_in_bfloat16(make, seed, dtype):
    """State kept in float32 for bfloat16 weights is float32 after loading: counts the tensors that are not."""
    params = weights(seed, torch.bfloat16)
    optimizer = make(params)
    drive(optimizer, params, range(5), seed)
    fresh_params = [torch.nn.Parameter(value) for value in values(params)]
    fresh = make(fresh_params)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def tensors(found):
        if torch.is_tensor(found):
            return [found]
        return [t for value in (found.values() if isinstance(found, dict) else ()) for t in tensors(value)]

    counted = 0
    for old, new in zip(params, fresh_params, strict=True):
        for kept, loaded in zip(tensors(optimizer.state[old]), tensors(fresh.state[new]), strict=True):
            counted += kept.dtype != loaded.dtype
    return counted


def unchanged_by_its_copy(make, seed, dtype):
    """A's state is loaded into B and B steps: A's next step is as if B were not there."""
    straight, _ = started(make, seed, dtype, 6)

    mine, first = started(make, seed, dtype, 5)
    other = weights(seed, dtype)
    second = make(other)
    second.load_state_dict(first.state_dict())
    drive(second, other, range(50, 53), seed)
    drive(first, mine, range(5, 6), seed)
    return gap(mine, straight)


def weights_unchanged_by_a_copy(make, seed, dtype):
    """A's state is loaded into B and B steps: A's weights stay where they are."""
    mine, first = started(make, seed, dtype, 5)
    kept = values(mine)
    other = weights(seed, dtype)
    second = make(other)
    second.load_state_dict(first.state_dict())
    drive(second, other, range(50, 53), seed)
    return gap(mine, kept)


def instances_apart(make, seed, dtype):
    """Two optimizers that take turns go where each goes alone."""
    alone = []
    for s, lr in ((seed, 0.1), (seed + 1, 0.05)):
        params = weights(s, dtype)
        drive(make(params, lr=lr), params, range(8), s)
        alone += params

    first, second = weights(seed, dtype), weights(seed + 1, dtype)
    one, two = make(first, lr=0.1), make(second, lr=0.05)
    for step in range(8):
        drive(one, first, [step], seed)
        drive(two, second, [step], seed + 1)
    return gap([*first, *second], alone)


def deep_copied(make, seed, dtype):
    """A deep copy of optimizer and weights goes on as the original does."""
    params, optimizer = started(make, seed, dtype, 5)
    twin_params, twin = copy.deepcopy((params, optimizer))
    drive(twin, twin_params, range(5, 10), seed)
    drive(optimizer, params, range(5, 10), seed)
    return gap(twin_params, params)


def pickled(make, seed, dtype):
    """So does what pickle makes of them."""
    params, optimizer = started(make, seed, dtype, 5)
    twin_params, twin = pickle.loads(pickle.dumps((params, optimizer)))
    drive(twin, twin_params, range(5, 10), seed)
    drive(optimizer, params, range(5, 10), seed)
    return gap(twin_params, params)


def weights_replaced(make, seed, dtype):
    """Weights whose storage is replaced (param.data = ...) are the ones that move."""
    straight, _ = started(make, seed, dtype, 6)

    params, optimizer = started(make, seed, dtype, 3)
    for param in params:
        param.data = param.data.clone()
    feed(params, 3, seed)
    optimizer.step()
    drive(optimizer, params, range(4, 6), seed)
    return gap(params, straight)


_LOSES = "state_dict does not hold all that the next steps depend on"
_SHARED = "two optimizers of the class share state: each changes the other's steps"
_BROKEN_SAVE = "state_dict or load_state_dict raises"

CHECKS = (
    Check(instances_apart, "instances-share-state", "fault", "high", _SHARED, "instances-clash", "a second optimizer makes one raise"),
    Check(
        resumed, "state-dict-incomplete", "fault", "high", f"{_LOSES}: a run resumed from it in a fresh optimizer goes elsewhere",
        "state-dict-raises", _BROKEN_SAVE,
    ),
    Check(
        resumed_with_another_lr, "load-needs-constructor", "fault", "medium",
        "after load_state_dict the constructor's lr still counts: a resumed run needs the very same constructor call",
        "state-dict-raises", _BROKEN_SAVE,
    ),
    Check(saved_to_file, "", "fault", "high", "", "state-dict-not-saveable", "the state_dict cannot be saved"),
    Check(
        loaded_weights_only, "state-dict-not-plain", "note", "low", "", "state-dict-not-plain",
        "torch.load(weights_only=True), its default, refuses the saved state_dict", "note",
    ),
    Check(resumed_from_file, "state-dict-not-saveable", "fault", "high", f"{_LOSES} once it went through torch.save and torch.load"),
    Check(
        resumed_before_the_first_step, "state-dict-incomplete", "fault", "low", "state saved before the first step does not load as it was",
        "state-dict-raises", "a state_dict saved before the first step does not load",
    ),
    Check(
        rewound, "state-kept-outside", "fault", "medium",
        "load_state_dict leaves state of its own in place: an optimizer that is set back to a checkpoint does not go on from it",
        "state-dict-raises", "an optimizer that has stepped refuses its own earlier state_dict",
    ),
    Check(
        weights_unchanged_by_a_copy, "load-shares-weights", "fault", "high",
        "stepping an optimizer that loaded another's state_dict moves the other's weights", "state-dict-raises", _BROKEN_SAVE,
    ),
    Check(
        weights_replaced, "replaced-weights-ignored", "fault", "medium",
        "weights that were replaced through param.data do not move as they should",
        "replaced-weights-raise", "a step after param.data was replaced raises",
    ),
    Check(
        deep_copied, "copies-differ", "note", "low", "a deep copy of the optimizer does not go on as the original does",
        "copies-unsupported", "the optimizer cannot go on from a deep copy", "note",
    ),
    Check(
        pickled, "copies-differ", "note", "low", "a pickled optimizer does not go on as the original does",
        "copies-unsupported", "the optimizer cannot go on from a pickle", "note",
    ),
)  # fmt: skip
