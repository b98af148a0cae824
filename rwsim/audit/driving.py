"""Checks of the lifecycle, second half: how an optimizer is built and driven.

Construction, closures, gradients, groups that come later, schedulers, loss scaling. Each is a program of its own (see
`rwsim.audit.bench`): its source is the snippet of its finding.
"""

import torch

from rwsim.audit.bench import Check, drive, feed, gap, schedules, started, values, weights


def weights_after_construction(make, seed, dtype):
    """Building an optimizer leaves the weights alone."""
    params = weights(seed, dtype)
    make(params)
    return gap(params, weights(seed, dtype))


def marks_after_construction(make, seed, dtype):
    """Building an optimizer leaves gradients, requires_grad and dtypes alone: counts what it changed."""
    params = weights(seed, dtype)
    feed(params, 0, seed)
    params[1].requires_grad_(False)
    grads = [param.grad.clone() for param in params]
    make(params)
    changed = sum(param.grad is None or not torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))
    changed += sum(param.dtype != dtype for param in params)
    return changed + int(not params[0].requires_grad) + int(params[1].requires_grad)


def frozen_parameter(make, seed, dtype):
    """A frozen parameter stays and disturbs no other."""
    alone = weights(seed, dtype)[:1]
    drive(make(alone), alone, range(4), seed)

    params = weights(seed, dtype)
    params[1].requires_grad_(False)
    frozen = values(params[1:])
    optimizer = make(params)
    drive(optimizer, params[:1], range(4), seed)
    return max(gap(params[:1], alone), gap(params[1:], frozen))


def step_without_gradients(make, seed, dtype):
    """Where no parameter has a gradient a step moves nothing, not even by weight decay."""
    params, optimizer = started(make, seed, dtype, 3)
    before = values(params)
    for param in params:
        param.grad = None
    optimizer.step()
    return gap(params, before)


def step_count_without_gradients(make, seed, dtype):
    """Steps without any gradient do not count as steps."""
    straight, _ = started(make, seed, dtype, 4)

    params = weights(seed, dtype)
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    drive(optimizer, params, range(4), seed)
    return gap(params, straight)


def late_parameter(make, seed, dtype):
    """A parameter whose first gradient comes at step 6 moves as at its own first step."""
    params = weights(seed, dtype)
    optimizer = make(params)
    drive(optimizer, params[:1], range(5), seed)
    for step in range(5):
        feed(params, step, seed)
        optimizer.step()

    alone = weights(seed, dtype)
    late = make(alone)
    for step in range(5):
        feed(alone, step, seed)
        late.step()
    return gap(params[1:], alone[1:])


def gradients_kept(make, seed, dtype):
    """A step leaves the gradients as they are; a gradient set to None shows, one that silently changed does not."""
    params = weights(seed, dtype)
    optimizer = make(params)
    worst = 0.0
    for step in range(3):
        feed(params, step, seed)
        before = [param.grad.clone() for param in params]
        optimizer.step()
        for param, grad in zip(params, before, strict=True):
            if param.grad is not None:
                worst = max(worst, gap([param.grad], [grad]))
    return worst


def gradients_beside_decay(make, seed, dtype):
    """A gradient that changed holds the weight decay: what is left of the change beside a multiple of the weights."""
    params = weights(seed, dtype)
    optimizer = make(params)
    feed(params, 0, seed)
    held, before = values(params), [param.grad.clone() for param in params]
    optimizer.step()
    found, right = [], []
    for param, weight, grad in zip(params, held, before, strict=True):
        if param.grad is None:
            continue
        change = param.grad - grad
        found.append(change)
        right.append((change * weight).sum() / (weight * weight).sum() * weight)
    return gap(found, right)


def gradients_left(make, seed, dtype):
    """Gradients are still there after a step: counts those that are not."""
    params, _ = started(make, seed, dtype, 1)
    return sum(param.grad is None for param in params)


def gradients_cleared(make, seed, dtype):
    """zero_grad clears every gradient: counts those that are left."""
    params = weights(seed, dtype)
    optimizer = make([{"params": [param]} for param in params])
    left = 0
    for options in ({}, {"set_to_none": False}, {"set_to_none": True}):
        feed(params, 0, seed)
        optimizer.zero_grad(**options)
        left += sum(param.grad is not None and bool(param.grad.any()) for param in params)
    return left


def gradients_reused(make, seed, dtype):
    """Gradients written in place into the same tensors, as without set_to_none, do what new tensors do."""
    ends = []
    for reused in (False, True):
        params = weights(seed, dtype)
        optimizer = make(params)
        held: list[torch.Tensor] = []
        for step in range(6):
            feed(params, step, seed)
            if reused and held:
                for i, param in enumerate(params):
                    param.grad = held[i].copy_(param.grad)
            held = [param.grad for param in params]
            optimizer.step()
        ends.append(values(params))
    return gap(ends[1], ends[0])


def closure_has_gradients(make, seed, dtype):
    """The closure runs with gradients enabled: counts the times that it does not."""
    params = weights(seed, dtype)
    optimizer = make(params)
    disabled = []

    def closure():
        disabled.append(not torch.is_grad_enabled())
        feed(params, 0, seed)
        return sum(param.detach().sum() for param in params)

    optimizer.step(closure)
    return sum(disabled)


def closure_calls(make, seed, dtype):
    """The closure is called once a step: how many calls too many or too few, in three steps."""
    params = weights(seed, dtype)
    optimizer = make(params)
    calls = []

    def closure():
        calls.append(0)
        feed(params, len(calls), seed)
        return torch.zeros(())

    for _ in range(3):
        optimizer.step(closure)
    return abs(len(calls) - 3)


def closure_loss(make, seed, dtype):
    """step(closure) returns the closure's loss: 1 if it does not."""
    params = weights(seed, dtype)
    optimizer = make(params)

    def closure():
        feed(params, 0, seed)
        return torch.tensor(0.75)

    loss = optimizer.step(closure)
    return int(loss is None or float(loss) != 0.75)


def closure_path(make, seed, dtype):
    """Gradients made by the closure's backward act as those that were there before the step."""
    straight, params = weights(seed, dtype), weights(seed, dtype)
    plain, optimizer = make(straight), make(params)
    for step in range(4):
        feed(straight, step, seed)
        factors = values([param.grad for param in straight])

        def closure(factors=factors):
            for param in params:
                param.grad = None
            with torch.enable_grad():
                loss = sum((param * factor).sum() for param, factor in zip(params, factors, strict=True))
                loss.backward()
            return loss

        optimizer.step(closure)
        plain.step()
    return gap(params, straight)


def group_added_later(make, seed, dtype):
    """A group added at step 5, with a learning rate of its own, moves as in an optimizer of its own."""
    alone = weights(seed, dtype)
    drive(make(alone[:1]), alone[:1], range(10), seed)
    own = make(alone[1:], lr=0.02)
    for step in range(5, 10):
        feed(alone, step, seed)
        own.step()

    params = weights(seed, dtype)
    optimizer = make(params[:1])
    drive(optimizer, params[:1], range(5), seed)
    optimizer.add_param_group({"params": params[1:], "lr": 0.02})
    drive(optimizer, params, range(5, 10), seed)
    return gap(params, alone)


def scheduler_followed(make, seed, dtype):
    """Steps follow a scheduler: 1 if they are those of the constructor's learning rate all the time."""
    plain = weights(seed, dtype)
    drive(make(plain, lr=0.1), plain, range(6), seed)

    params = weights(seed, dtype)
    optimizer = make(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(6):
        drive(optimizer, params, [step], seed)
        scheduler.step()
    return int(all(torch.equal(a, b) for a, b in zip(params, plain, strict=True)))


def scheduled_lr(make, seed, dtype):
    """The learning rates that three schedulers set stay as they were set; the largest relative difference."""
    worst = 0.0
    for kind, right in schedules():
        params = weights(seed, dtype)
        optimizer = make(params, lr=0.1)
        scheduler = kind(optimizer)
        for step in range(5):
            worst = max(worst, abs(float(optimizer.param_groups[0]["lr"]) / (0.1 * right(step)) - 1))
            drive(optimizer, params, [step], seed)
            scheduler.step()
    return 0.0 if worst < 1e-5 else worst


def scheduled_tensor_lr(make, seed, dtype):
    """The same for a learning rate that is a tensor: a factor of 0.5 halves it each time, and the steps follow it."""
    worst = 0.0
    for kind, right in schedules():
        # 1/8 is the same number in every dtype.
        params, by_hand = weights(seed, dtype), weights(seed, dtype)
        optimizer, plain = make(params, lr=torch.tensor(0.125)), make(by_hand, lr=0.125)
        scheduler = kind(optimizer)
        for step in range(5):
            worst = max(worst, abs(float(optimizer.param_groups[0]["lr"]) / (0.125 * right(step)) - 1))
            drive(optimizer, params, [step], seed)
            plain.param_groups[0]["lr"] = float(optimizer.param_groups[0]["lr"])
            drive(plain, by_hand, [step], seed)
            scheduler.step()
        # Where the next scheduler starts from.
        worst = max(worst, gap(params, by_hand), abs(float(optimizer.param_groups[0]["initial_lr"]) / 0.125 - 1))
    # A tensor rounds to float32.
    return 0.0 if worst < 1e-5 else worst


def overflow_skipped(make, seed, dtype):
    """Under a GradScaler a step with an infinite gradient leaves weights and state as if it had not been."""
    straight, _ = started(make, seed, dtype, 6)

    params = weights(seed, dtype)
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in (0, 1, 2, "overflow", 3, 4, 5):
        scale = float(scaler.scale(torch.ones(())))
        feed(params, 0 if step == "overflow" else step, seed, scale)
        if step == "overflow":
            params[0].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    return gap(params, straight)


_CLOSURE = "step(closure) raises"
_SCHEDULER = "torch's learning rate schedulers do not work with it"

GROUP = Check(
    group_added_later, "late-group-wrong", "fault", "medium",
    "a group added after construction, with a learning rate of its own, does not move as in an optimizer of its own",
    "late-group-raises", "a group added after construction raises",
)  # fmt: skip
CHECKS = (
    Check(weights_after_construction, "construction-changes-weights", "fault", "high", "the constructor changes the weights"),
    Check(
        marks_after_construction, "construction-changes-parameters", "fault", "medium",
        "the constructor changes gradients, requires_grad or dtypes of the parameters",
        "frozen-parameter-raises", "a parameter without requires_grad makes the constructor raise", exact=True,
    ),
    Check(
        frozen_parameter, "frozen-parameter-moves", "fault", "medium", "a frozen parameter moves or changes how others do",
        "frozen-parameter-raises", "a parameter without requires_grad makes it raise",
    ),
    Check(
        step_without_gradients, "moves-without-gradient", "fault", "medium", "a step moves weights that have no gradient (grad is None)",
        "step-without-gradients-raises", "a step without any gradient raises",
    ),
    Check(
        gradients_left, "gradient-consumed", "note", "low",
        "step() sets the gradients to None: what reads them afterwards finds none, and a second step does nothing", exact=True,
    ),
    Check(
        gradients_cleared, "zero-grad-incomplete", "fault", "medium", "zero_grad leaves gradients that are not zero",
        "zero-grad-raises", "zero_grad raises", exact=True,
    ),
    Check(
        gradients_reused, "buffer-shares-gradient", "fault", "high",
        "a gradient tensor that is used again (zero_grad without set_to_none) changes what the optimizer remembers: "
        "a buffer is the gradient itself",
    ),
    Check(
        closure_has_gradients, "closure-without-grad", "fault", "medium",
        "the closure runs under no_grad: one that calls backward, as torch's do, fails", "closure-raises", _CLOSURE, exact=True,
    ),
    Check(
        closure_calls, "closure-calls", "fault", "medium", "the closure is not called once a step", "closure-raises", _CLOSURE, exact=True,
    ),
    Check(closure_loss, "closure-loss-lost", "fault", "low", "step(closure) does not return the closure's loss", exact=True),
    Check(
        closure_path, "closure-changes-step", "fault", "medium", "a step with a closure differs from one with the same gradients",
        "closure-raises", _CLOSURE,
    ),
    Check(
        step_count_without_gradients, "empty-steps-count", "note", "low",
        "steps without any gradient count as steps, and change the bias correction of later ones",
        "empty-first-step-raises", "a first step without any gradient raises", "note",
    ),
    GROUP,
    Check(
        scheduler_followed, "scheduler-ignored", "fault", "high",
        "steps do not follow the group's learning rate: the constructor's is used all the time", "scheduler-raises", _SCHEDULER, exact=True,
    ),
    Check(
        scheduled_lr, "scheduled-lr-changed", "fault", "high",
        "the learning rate that a scheduler sets does not stay: the optimizer changes it, or what the scheduler starts from",
        "scheduler-raises", _SCHEDULER, exact=True,
    ),
    Check(
        scheduled_tensor_lr, "tensor-lr-compounds", "fault", "medium",
        "with a learning rate that is a tensor, schedulers do not give what they give with a number: factors multiply "
        "repeatedly (it shares memory with initial_lr or with the state), or its changes are not followed", exact=True,
    ),
    Check(
        overflow_skipped, "overflow-advances-state", "fault", "medium",
        "under a GradScaler a step with an infinite gradient changes weights or state",
        "scaler-raises", "a GradScaler does not work with it",
    ),
)  # fmt: skip
