"""P8: what happens to an optimizer around its steps.

It is built, driven by closures, schedulers and loss scaling, gets further groups, is saved and loaded, copied, and used beside
others. None of that may change where it goes. Most checks are of that form: a run with an event is held against the same run
without it, in the same arithmetic, so that a difference beyond rounding is the event's. They are programs
(`rwsim.audit.saving`, `rwsim.audit.driving`), and the program that found a fault is its snippet.

Some things are judged here, not there. State kept in float32 for bfloat16 weights is cast to bfloat16 by torch's own
load_state_dict, for any subclass that does not prevent it: a note, and a fault only where the class loads by its own code. Tensors
shared after load_state_dict are a note as long as torch.optim.AdamW shares them as well. A step count kept for the group instead
of the parameter is not torch's, but good libraries keep it so: a note, unless it reaches beyond the group. A gradient that was
rewritten is a fault, except where the only change is that l2 decay was added to it in place: then what is left is still the
gradient that the rule is about, and a note says so.

What a class does not have at all (no param_groups, no closure) does not apply, unless it is a torch.optim.Optimizer: that
promises it. Where steps draw random numbers, runs cannot be compared, and only what needs no comparison is examined.
"""

import torch

from rwsim.audit import driving, saving
from rwsim.audit.bench import Bench, Check, quiet, ready, started, values, weights
from rwsim.audit.context import Context, Result

TITLE = "lifecycle"

# Checks that hold no run against another.
_ALONE = (
    driving.weights_after_construction, driving.marks_after_construction, driving.step_without_gradients,
    driving.gradients_left, driving.gradients_cleared, driving.closure_has_gradients, driving.closure_calls, driving.closure_loss,
    driving.scheduled_lr, saving.saved_to_file, saving.loaded_weights_only, saving.weights_unchanged_by_a_copy,
)  # fmt: skip

_RESUMED = (saving.resumed_with_another_lr, saving.resumed_from_file, saving.rewound)


def run(context: Context) -> Result:
    with quiet(context.seed):
        bench = ready(context, "P8")
        checks: tuple[Check, ...] = (*saving.CHECKS, *driving.CHECKS)
        if draws(bench):
            bench.result.measured["random"] = "steps draw random numbers: runs are not compared"
            checks = tuple(check for check in checks if check.program in _ALONE)
        elif not (bench.run(saving.CHECKS[0]) or 0.0) <= bench.tolerance:
            # Each run would depend on those before it: what compares runs would only say so again.
            checks = tuple(check for check in checks if check.program in _ALONE)
        else:
            _aliasing(bench)
            _step_counts(bench)
        for check in checks:
            name = check.program.__name__
            # A state_dict that is incomplete, or cannot be loaded at all, shows in each way of resuming: once is enough.
            faults = [finding.code for finding in bench.result.findings if finding.kind == "fault"]
            known = check.program in _RESUMED and any(code.startswith("state-dict") for code in faults)
            if name not in bench.result.measured and not known:
                bench.run(check)
        _gradients(bench)
        _bfloat16(bench)
        return bench.result


def draws(bench: Bench) -> bool:
    """Whether its steps draw from torch's random numbers: equal runs differ, unless seeded alike."""

    def paths(make, seed, dtype):
        ends = []
        for start in (1, 1, 2):
            torch.default_generator.manual_seed(start)
            params, _ = started(make, seed, dtype, 6)
            ends.append(values(params))
        return ends

    first, same, other = bench.call(paths)
    equal = [all(torch.equal(a, b) for a, b in zip(first, end, strict=True)) for end in (same, other)]
    return equal == [True, False]


def _aliasing(bench: Bench) -> None:
    """Whether the state is shared after load_state_dict, beside what torch's own optimizer does."""
    program = saving.unchanged_by_its_copy
    try:
        mine = bench.call(program)
    except Exception as error:  # reported by the checks of state_dict
        bench.result.measured[program.__name__] = f"raises: {type(error).__name__}"
        return
    torchs = program(lambda params: torch.optim.AdamW(params, lr=0.1), bench.context.seed, bench.context.dtype)
    bench.result.measured[program.__name__] = mine if mine < float("inf") else "not finite"
    if not mine <= bench.tolerance:
        common = torchs > bench.tolerance
        bench.add(
            "load-aliases-state", "note" if common else "fault", "low" if common else "high",
            "load_state_dict keeps the tensors of the state_dict it is given: two optimizers that share one change each other's state"
            + (" (as torch.optim does)" if common else ""),
            program, effect=mine if mine < float("inf") else None, error=bench.tolerance, said=f"this optimizer gives {mine:.6g}",
        )  # fmt: skip


def _bfloat16(bench: Bench) -> None:
    """Whether loading keeps float32 state beside bfloat16 weights."""
    program = saving.loaded_in_bfloat16
    try:
        count = int(bench.call(program))
    except Exception as error:  # bfloat16 itself is P9's
        bench.result.measured[program.__name__] = f"not applicable: {type(error).__name__}"
        return
    bench.result.measured[program.__name__] = count
    if count:
        own = type(bench.make(weights(0, bench.context.dtype)))
        # bitsandbytes and others do it right in a method of their own: whoever writes one answers for it.
        inherited = getattr(own, "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
        bench.add(
            "load-casts-state", "note" if inherited else "fault", "low" if inherited else "medium",
            "load_state_dict casts float32 state to the bfloat16 of the weights: a resumed run is not the run that was saved"
            + (" (torch.optim.Optimizer's own load_state_dict does)" if inherited else ""),
            program, effect=float(count), error=0.0, said=f"this optimizer gives {count}",
        )  # fmt: skip


def _step_counts(bench: Bench) -> None:
    """Whose the step count is: the parameter's (torch), its group's, or the optimizer's."""
    program = driving.late_parameter
    beyond = not (bench.run(driving.GROUP) or 0.0) <= bench.tolerance
    check = Check(
        program, "step-count-shared", "fault" if beyond else "note", "medium" if beyond else "low",
        f"one step count for the whole {'optimizer' if beyond else 'group'}: a parameter whose first gradient comes late gets the bias "
        "correction of a late step (torch counts for each parameter)",
        # A note, as torch's own fused SGD does.
        "late-parameter-raises", "a parameter whose first gradient comes late raises", "note",
    )  # fmt: skip
    bench.run(check)


def _gradients(bench: Bench) -> None:
    """Whether a step rewrites the gradients, and to what."""
    program = driving.gradients_kept
    departure = float(bench.call(program))
    bench.result.measured[program.__name__] = departure if departure < float("inf") else "not finite"
    if departure <= 0.0:
        return
    decay = float(bench.call(driving.gradients_beside_decay)) <= bench.tolerance
    bench.add(
        "gradient-mutated", "note" if decay else "fault", "low" if decay else "medium",
        "step() rewrites the gradients: what reads them afterwards (logging, clipping, accumulation) sees other values"
        + (", the gradient with the weight decay in it" if decay else ""),
        program, effect=departure if departure < float("inf") else None, error=0.0, said=f"this optimizer gives {departure:.6g}",
    )  # fmt: skip
