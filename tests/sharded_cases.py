"""More cases of sharded parameters: single tensors under any placement, refusals, bytes, checkpoints."""

import math
import shutil
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rwsim.errors import InvalidArgument
from rwsim.rotational import RotationalAdamW
from tests.rotational import CLASSES, seeded
from tests.sharding import CASES, CLOSE, FOUR, LAYOUTS, STEPS, WRAPPED, Layout, Net, apart, data, single, train, whole

# Single tensors under given gradients: any placement, without a model that could compute with it.


def pair(shape: tuple[int, ...], dtype: torch.dtype, device: str, placements: Any, mesh_shape: tuple[int, ...] | None = None) -> Any:
    """A parameter, whole and sharded."""
    from torch.distributed.tensor import distribute_tensor

    values = torch.randn(shape, generator=seeded(3), dtype=torch.float64).to(device, dtype)
    mesh = dist.init_device_mesh(device.partition(":")[0], mesh_shape or (dist.get_world_size(),))
    return nn.Parameter(values.clone()), nn.Parameter(distribute_tensor(values, mesh, placements))


def feed(shape: tuple[int, ...], dtype: torch.dtype, steps: int = STEPS) -> list[Tensor]:
    """Gradients; in two of three steps none for the last row, in the others one of a single element for the first."""
    grads = torch.randn(steps, *shape, generator=seeded(4), dtype=torch.float64)
    for step in range(2, steps):
        if step % 3:
            grads[step, -1] = 0
        else:
            grads[step, 0].view(-1)[1:] = 0
    return list(grads.to(dtype))


def walk(alone: Any, sharded: Any, optimizers: Any, grads: Iterable[Tensor], grad_placements: Any = None) -> None:
    from torch.distributed.tensor import distribute_tensor

    for grad in grads:
        alone.grad = grad.to(alone.device)
        sharded.grad = distribute_tensor(alone.grad, sharded.device_mesh, grad_placements or sharded.placements)
        for optimizer in optimizers:
            optimizer.step()


def tensor(
    name: str, shape: tuple[int, ...], placements: Any, device: str, *, dtype: torch.dtype = torch.float64, tolerance: float | None = None,
    mesh_shape: tuple[int, ...] | None = None, grad_placements: Any = None, change: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Parameter, residual and one number a vector are those of a whole parameter."""
    alone, sharded = pair(shape, dtype, device, placements, mesh_shape)
    optimizers = [CLASSES[name]([param], **options) for param in (alone, sharded)]
    assert all(one.is_rotational(one.param_groups[0], one.param_groups[0]["params"][0]) for one in optimizers)
    for optimizer in optimizers:
        if change is not None:
            change(optimizer)
    walk(alone, sharded, optimizers, feed(shape, dtype), grad_placements)
    mine, theirs = optimizers[0].state[alone], optimizers[1].state[sharded]
    assert mine.keys() == theirs.keys()
    close = CLOSE[dtype] if tolerance is None else tolerance
    held = [(whole(alone), whole(sharded)), *((whole(mine[key]), whole(theirs[key])) for key in mine)]
    if "residual" in mine:
        # What parameter and residual are together.
        whole_values = [whole(param).float() + whole(state["residual"]).float() for param, state in ((alone, mine), (sharded, theirs))]
        held = [(whole_values[0], whole_values[1]), *((whole(mine[key]), whole(theirs[key])) for key in ("norm", "update_norm_sq", "hits"))]
    for one, other in held:
        assert one.shape == other.shape and one.dtype == other.dtype
        assert float((one - other).abs().max()) <= close * max(1.0, float(one.abs().max())), (one, other)
    assert math.isclose(float(whole(sharded).double().norm()), float(whole(alone).double().norm()), rel_tol=1e-3)


def speeds(optimizer: Any) -> None:
    from rwsim.rotational import set_speeds

    set_speeds(optimizer, 0.5, 3.0, "both", seeded(5))


def tensors(shard: Any, replicate: Any, partial_sum: Any) -> None:
    """Fill CASES. Placements are arguments, so that a build without torch.distributed can still read this file."""
    single: list[tuple[str, tuple[int, ...], Any, dict[str, Any]]] = [
        ("five rows", (5, 4), shard(0), {}),
        ("one row for two", (1, 6), shard(0), {}),
        ("five columns", (4, 5), shard(1), {}),
        ("one column for two", (3, 1, 3, 3), shard(1), {}),
        ("kernels", (4, 3, 3, 2), shard(2), {}),
        ("whole tensor by rows", (5, 4), shard(0), {"per_neuron": False}),
        ("whole tensor of one row", (1, 6), shard(0), {"per_neuron": False}),
        ("whole tensor by columns", (5, 4), shard(1), {"per_neuron": False}),
        ("neurons in columns", (5, 4), shard(0), {"neuron_dims": (1,)}),
        ("neurons in columns, by columns", (5, 3), shard(-1), {"neuron_dims": (-1,)}),
        ("experts", (3, 4, 5), shard(0), {"neuron_dims": (0, 1)}),
        ("blocks by columns", (6, 5), shard(1), {"blocks": 3, "per_neuron": False}),
        ("blocks of neurons in columns", (9, 5), shard(1), {"blocks": 3, "neuron_dims": (1,)}),
        ("replicated", (5, 4), replicate(), {}),
        ("uncentred", (4, 5), shard(1), {"zero_mean": False}),
        ("fixed angle", (4, 5), shard(1), {"fixed_angle": True}),
        ("speeds by columns", (4, 5), shard(1), {"change": speeds}),
        ("speeds by rows", (5, 4), shard(0), {"change": speeds}),
        ("gradient whole", (4, 5), shard(1), {"grad_placements": [replicate()]}),
        ("gradient partial", (5, 4), shard(0), {"grad_placements": [partial_sum()]}),
        ("gradient by rows", (4, 5), shard(1), {"grad_placements": [shard(0)]}),
        ("float32", (4, 5), shard(1), {"dtype": torch.float32}),
        ("foreach by columns", (4, 5), shard(1), {"foreach": True}),
        ("foreach, one column for two", (3, 1, 3, 3), shard(1), {"foreach": True}),
        ("foreach, one row for two", (1, 6), shard(0), {"foreach": True}),
        ("foreach, blocks by columns", (6, 5), shard(1), {"blocks": 3, "per_neuron": False, "foreach": True}),
        ("foreach, speeds", (4, 5), shard(1), {"change": speeds, "foreach": True}),
        ("foreach, bf16", (4, 5), shard(1), {"dtype": torch.bfloat16, "tolerance": 1e-4, "foreach": True}),
        ("fused by rows", (5, 8), shard(0), {"dtype": torch.float32, "fused": True, "tolerance": 0.0}),
        ("fused, one row for two", (1, 8), shard(0), {"dtype": torch.float32, "fused": True, "tolerance": 0.0}),
        # Residuals are of bf16 as well: to 2^-16 of the weights.
        ("bf16", (4, 5), shard(1), {"dtype": torch.bfloat16, "tolerance": 1e-4}),
        ("bf16 by rows", (5, 4), shard(0), {"dtype": torch.bfloat16, "tolerance": 0.0, "fused": False}),
    ]
    for what, shape, placement, options in single:
        CASES[f"{what}, adamw"] = partial(tensor, "adamw", shape, [placement], **options)
    every: list[tuple[str, tuple[int, ...], Any, dict[str, Any]]] = [
        ("columns", (4, 5), shard(1), {}),
        ("whole tensor by rows", (5, 4), shard(0), {"per_neuron": False}),
        ("blocks by columns", (6, 5), shard(1), {"blocks": 3, "per_neuron": False}),
        ("bf16", (4, 5), shard(1), {"dtype": torch.bfloat16, "tolerance": 1e-4}),
    ]
    for name, (what, shape, placement, options) in product(["adam", "rule", *WRAPPED], every):
        # Decay in the gradient is rounded to bf16 inside a wrapped Adam.
        if (name, what) != ("wrapped adam", "bf16"):
            more: dict[str, Any] = {"rotation": 0.01} if name == "rule" else {}  # a rate of its own takes seconds to derive
            CASES[f"{what}, {name}"] = partial(tensor, name, shape, [placement], **options, **more)
    CASES["equilibrium norm, lion"] = partial(tensor, "lion", (4, 5), [shard(1)], norm="equilibrium")
    CASES["sgdm without momentum, sgdm"] = partial(tensor, "sgdm", (4, 5), [shard(1)], momentum=0.0)
    for what, placement in [("rows and columns", [shard(0), shard(1)]), ("columns twice", [shard(1), shard(1)]),
                            ("replicated columns", [replicate(), shard(1)])]:  # fmt: skip
        for own in (True, False):
            FOUR[f"{what}, {'neurons' if own else 'whole tensor'}"] = partial(
                tensor, "adamw", (3, 7), placement, mesh_shape=(2, 2), per_neuron=own
            )
    FOUR["case 27: four shards of one row have the norm of the whole row"] = case_27


def case_27(device: str) -> None:
    """Audit case 27: norms of sharded parameters are local; 4 shards of one row: full-row norm."""
    from torch.distributed.tensor import Shard

    alone, sharded = pair((1, 10), torch.float64, device, [Shard(1)])
    norm = float(alone.detach().norm())
    optimizers = [RotationalAdamW([param], lr=1e-2, weight_decay=0.1) for param in (alone, sharded)]
    walk(alone, sharded, optimizers, feed((1, 10), torch.float64))
    state = optimizers[1].state[sharded]
    assert state["norm"].to_local().shape == (1, 1)
    assert math.isclose(float(state["norm"].to_local()), norm, rel_tol=1e-14), "a shard's own norm"
    assert math.isclose(float(whole(sharded).norm()), norm, rel_tol=1e-14)
    assert float((whole(sharded) - whole(alone)).abs().max()) < CLOSE[torch.float64]


def nan(device: str) -> None:
    """A NaN in one process's shard reaches the whole row, and no other."""
    from torch.distributed.tensor import Shard

    alone, sharded = pair((3, 4), torch.float64, device, [Shard(1)])
    grad = torch.ones(3, 4, dtype=torch.float64)
    grad[1, 0] = math.nan
    walk(alone, sharded, [CLASSES["lion"]([param]) for param in (alone, sharded)], [grad])
    assert whole(sharded).isnan().any(1).tolist() == [False, True, False]
    assert torch.equal(whole(sharded).isnan(), whole(alone).isnan())


def refused(device: str) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard

    _, sharded = pair((6, 4), torch.float64, device, [Shard(0)])
    refusals: list[dict[str, Any]] = [{"blocks": 3}, {"blocks": 3, "per_neuron": False}]
    for given in refusals:
        with pytest.raises(InvalidArgument, match=r"`blocks` must be 1 .* dimension 0 is sharded, got 3; shard another dimension"):
            RotationalAdamW([sharded], weight_decay=0.1, **given)
    summed = nn.Parameter(DTensor.from_local(sharded.to_local().detach(), sharded.device_mesh, [Partial()]))
    with pytest.raises(InvalidArgument, match="`params` must not hold partial sums"):
        RotationalAdamW([summed], weight_decay=0.1)


def small_blocks(device: str) -> None:
    """A CPU works in blocks of rows: where processes add up, all take as many, whatever their own share of a row."""
    from torch.distributed.tensor import Shard

    import rwsim.rotational.optimizer as module

    kept, module._BLOCK = module._BLOCK, 4
    try:
        for dim in (0, 1):
            tensor("adamw", (5, 3), [Shard(dim)], device)
    finally:
        module._BLOCK = kept


def communicates(device: str) -> None:
    """What docs/rotational.md says of bytes: none where rows are whole; 40 and 8 a vector in two rounds, of a tensor or of a lot."""
    import rwsim.rotational.sharded as module

    kept, sent = module.dist.all_reduce, []

    def counted(sums: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(sums.numel() * sums.element_size())
        return kept(sums, *args, **kwargs)

    module.dist.all_reduce = counted  # type: ignore[assignment]
    try:
        for where, foreach, expected in (
            ("fsdp rows", False, []),
            ("fsdp columns", False, [40 * 8, 8 * 8, 40 * 5, 8 * 5, 40, 8]),
            ("fsdp columns", True, [40 * 14, 8 * 14]),
            ("tensor parallel", False, [40 * 5, 8 * 5]),
        ):
            place, split = LAYOUTS[where]
            model = place(Net(torch.float32, device), device)
            optimizer = CLASSES["adamw"](model.parameters(), foreach=foreach)
            optimizer.centre()
            batches = data(torch.float32, device, 2)
            train(model, optimizer, batches[:1], split)
            (model(batches[1][0]) - batches[1][1]).square().mean().backward()
            sent.clear()
            optimizer.step()
            assert sent == expected, (where, sent)
    finally:
        module.dist.all_reduce = kept


CASES |= {"nan": nan, "refused": refused, "communicates": communicates, "small blocks": small_blocks}


# Checkpoints: half of the steps under one layout, the rest under another.


def begin(layout: Layout | None, dtype: torch.dtype, device: str, name: str = "adamw", **options: Any) -> Any:
    """Model, optimizer, whether a batch is split; None: one process's own."""
    model: Any = Net(dtype, device)
    if layout is not None:
        model = layout[0](model, device)
    return model, CLASSES[name](model.parameters(), **options), bool(layout and layout[1])


def ended(model: nn.Module, optimizer: Any, split: bool, dtype: torch.dtype, device: str, name: str, **options: Any) -> None:
    """The other half of the steps ends where all of one process do."""
    train(model, optimizer, data(dtype, device)[STEPS // 2 :], split)
    assert apart(model, single(name, dtype, device, **options)) <= CLOSE[dtype]


def own_state(layout: Layout, device: str, name: str, **options: Any) -> None:
    """state_dict and load_state_dict, under the same layout."""
    dtype = torch.float64
    model, optimizer, split = begin(layout, dtype, device, name, **options)
    train(model, optimizer, data(dtype, device)[: STEPS // 2], split)
    saved = deepcopy(optimizer.state_dict()), deepcopy(model.state_dict())
    model, optimizer, split = begin(layout, dtype, device, name, **options)
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    ended(model, optimizer, split, dtype, device, name, **options)


def whole_state(source: Layout, target: Layout | None, device: str, name: str) -> None:
    """Full state dicts: every process holds all of it, also for the optimizer's own load_state_dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    dtype = torch.float64
    model, optimizer, split = begin(source, dtype, device, name)
    train(model, optimizer, data(dtype, device)[: STEPS // 2], split)
    full = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=full)
    entries: Any = state["state"]
    assert not any(hasattr(value, "full_tensor") for entry in entries.values() for value in entry.values())
    plain, other, _ = begin(None, dtype, device, name)
    train(plain, other, data(dtype, device)[: STEPS // 2])
    expected = other.state_dict()
    for own in (False, True):
        model, optimizer, split = begin(target, dtype, device, name)
        if own:
            # One process's own state dict, loaded into shards.
            set_state_dict(model, [], model_state_dict=weights, optim_state_dict={}, options=full)
            optimizer.load_state_dict(deepcopy(expected))
        else:
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=deepcopy(state), options=full)
        ended(model, optimizer, split, dtype, device, name)


def saved_state(source: Layout | None, target: Layout | None, device: str, name: str) -> None:
    """torch.distributed.checkpoint, through files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dtype = torch.float64
    model, optimizer, split = begin(source, dtype, device, name)
    train(model, optimizer, data(dtype, device)[: STEPS // 2], split)
    folder = [tempfile.mkdtemp() if not dist.get_rank() else None]
    dist.broadcast_object_list(folder)
    weights, state = get_state_dict(model, optimizer)
    alone = source is None
    if not alone or not dist.get_rank():
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0], no_dist=alone)
    dist.barrier()
    model, optimizer, split = begin(target, dtype, device, name)
    weights, state = get_state_dict(model, optimizer)
    both: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=folder[0], no_dist=target is None)
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(str(folder[0]))
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    ended(model, optimizer, split, dtype, device, name)


ROWS, COLUMNS, TENSOR = (LAYOUTS[name] for name in ("fsdp rows", "fsdp columns", "tensor parallel"))
for said, found in (("rows", ROWS), ("columns", COLUMNS), ("tensor parallel", TENSOR)):
    CASES[f"own state, {said}"] = partial(own_state, found, name="adamw")
CASES["own state, whole tensors by rows"] = partial(own_state, ROWS, name="sgdm", per_neuron=False)
CASES["own state, wrapped"] = partial(own_state, COLUMNS, name="wrapped adamw")
for said, source, target in (
    ("rows to columns", ROWS, COLUMNS), ("columns to one process", COLUMNS, None), ("columns to tensor parallel", COLUMNS, TENSOR),
):  # fmt: skip
    CASES[f"full state, {said}"] = partial(whole_state, source, target, name="adamw")
for said, first, second, name in (
    ("rows to columns", ROWS, COLUMNS, "adamw"), ("columns to rows", COLUMNS, ROWS, "sgdm"), ("rows to one process", ROWS, None, "adam"),
    ("one process to rows", None, ROWS, "lion"), ("one process to columns", None, COLUMNS, "adamw"),
    ("tensor parallel to rows", TENSOR, ROWS, "lion"),
):  # fmt: skip
    CASES[f"checkpoint, {said}, {name}"] = partial(saved_state, first, second, name=name)

if dist.is_available():
    from torch.distributed.tensor import Partial, Replicate, Shard

    tensors(Shard, Replicate, Partial)
