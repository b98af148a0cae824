"""Optax-style gradient transformations, as optimizers that the audit can drive; nothing here needs JAX.

A transformation is a pair of functions, ``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``,
and the parameters become ``params + updates``. Its factory takes the hyperparameters.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rwsim.audit.script import BASE
from rwsim.audit.subject import ALIASES, PARAMS
from rwsim.errors import InvalidArgument


def transform(factory: Callable[..., Any], name: str = "") -> type[torch.optim.Optimizer]:
    """An optimizer class of torch's kind that takes the steps of a factory's transformations.

    Each parameter is a tree of its own: what a transformation does across parameters (clipping by a global norm) is not
    seen. It gets NumPy arrays that cannot be written to, and may return anything that NumPy can read. Parameters without a
    gradient are left out. A change of a hyperparameter in ``param_groups`` makes a new transformation, that goes on with the
    old state, as ``optax.inject_hyperparams`` does.

    Args:
        factory: Takes hyperparameters as keywords and returns an object with ``init`` and ``update``, or such a pair.
        name: What to call it; by default as the factory is called.

    Returns:
        A class whose constructor takes parameters and then the factory's keywords.

    Raises:
        InvalidArgument: The factory cannot be called, or its signature cannot be read.

    Example:
        >>> import numpy as np, torch
        >>> def sgd(learning_rate):
        ...     return (lambda params: (), lambda grads, state, params=None: (-learning_rate * grads, state))
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = transform(sgd)([w], learning_rate=0.5)
        >>> w.grad = torch.tensor([1.0])
        >>> optimizer.step(); w.item()
        0.5
    """
    if not callable(factory):
        raise InvalidArgument(
            "optimizer", "must be a function that returns a transformation", factory, "name the function, not what it returns"
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        raise InvalidArgument("optimizer", "must have a signature that can be read", name, "wrap it in a function") from None
    given = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    called = name or getattr(factory, "__name__", type(factory).__name__)
    place = {"__module__": getattr(factory, "__module__", __name__), "__qualname__": getattr(factory, "__qualname__", called)}
    keywords = {parameter.name: parameter.default for parameter in given}
    known = {"factory": staticmethod(factory), "keywords": keywords, "__signature__": signature.replace(parameters=[first, *given, *rest])}
    return type(called, (_Transformed,), {**place, **known})


def parts(found: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """``init`` and ``update`` of a transformation, or None if it is none."""
    if isinstance(found, tuple) and len(found) == 2 and all(callable(part) for part in found):
        return found
    init, update = getattr(found, "init", None), getattr(found, "update", None)
    return (init, update) if callable(init) and callable(update) else None


def as_optimizer(make: Any, settings: Mapping[str, Any], name: str) -> Any:
    """What a `Subject` takes: a transformation's factory wrapped, anything else as it is.

    A factory is known by what it returns: it is called once, if its first argument is not the parameters.

    Raises:
        InvalidArgument: A transformation itself: its hyperparameters are out of reach.
    """
    if callable(getattr(make, "step", None)):
        return make
    if not callable(make) and parts(make) is None:
        raise InvalidArgument("optimizer", "must be an optimizer class", name, "name a class such as torch.optim:AdamW")
    if not inspect.isclass(make) and parts(make) is not None:
        raise InvalidArgument("optimizer", "must be a function that returns a transformation, not one itself", name, "name the function")
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return make
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if named and named[0].name in PARAMS:
        return make
    keywords = dict(settings)
    for parameter in named:
        if parameter.default is parameter.empty and (value := _usual(parameter.name)) is not None:
            keywords.setdefault(parameter.name, value)
    try:
        made = make(**keywords)
    except Exception:  # it is no factory, or its Subject says what it lacks
        return transform(make) if _looks_like(make) else make
    return transform(make) if parts(made) is not None else make


def _usual(keyword: str) -> Any:
    """A value for a hyperparameter by any of its names, or None."""
    for name, aliases in ALIASES.items():
        for alias in aliases:
            if keyword == alias:
                return BASE.get(name)
            if isinstance(alias, tuple) and keyword in alias:
                return BASE[name][alias.index(keyword)]
    return None


def _looks_like(make: Any) -> bool:
    return inspect.isclass(make) and callable(getattr(make, "init", None)) and callable(getattr(make, "update", None))


class _Transformed(torch.optim.Optimizer):
    """See `transform`."""

    factory: Callable[..., Any]
    keywords: Mapping[str, Any]

    def __init__(self, params: Any, **given: Any) -> None:
        unknown = [key for key in self.keywords if self.keywords[key] is inspect.Parameter.empty and key not in given]
        if unknown:
            raise TypeError(f"missing required keyword {unknown[0]!r}")
        values = {**{key: value for key, value in self.keywords.items()}, **given}
        defaults = {("lr" if key == self._lr else key): value for key, value in values.items()}
        super().__init__(params, defaults)
        for group in self.param_groups:
            self._transformation(group)  # refuses what the factory refuses

    @property
    def _lr(self) -> str | None:
        """The factory's word for the learning rate, which schedulers look for as `lr`."""
        return next((alias for alias in ALIASES["lr"] if alias in self.keywords), None)

    def _transformation(self, group: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        values = {}
        for key in self.defaults:
            if key == "differentiable" and key not in self.keywords:  # torch's own
                continue
            value = group[key]
            values[self._lr if key == "lr" and self._lr else key] = value.item() if isinstance(value, Tensor) and not value.ndim else value
        found = parts(self.factory(**values))
        if found is None:
            raise TypeError("the factory returned neither a pair of functions nor an object with `init` and `update`")
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            init, update = self._transformation(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                weights, grad = _array(param), _array(param.grad)
                if not self.state[param]:
                    self._put(param, init(weights))
                updates, state = update(grad, self._get(param, init), weights)
                moved = weights + np.asarray(updates)
                with torch.no_grad():
                    param.copy_(torch.from_numpy(np.array(moved)))
                self._put(param, state)
        return loss

    def _put(self, param: Tensor, state: Any) -> None:
        leaves, _ = pytree.tree_flatten(state)
        arrays = [np.array(leaf) if hasattr(leaf, "__array__") else leaf for leaf in leaves]
        # Tensors, so that a state_dict is one of torch's: it can be saved, copied and compared.
        self.state[param] = {f"leaf {i}": _held(leaf) for i, leaf in enumerate(arrays)} or {"empty": True}

    def _get(self, param: Tensor, init: Callable[..., Any]) -> Any:
        state = self.state[param]
        leaves = [state[f"leaf {i}"] for i in range(len(state) - ("empty" in state))]
        leaves = [_frozen(leaf.numpy().copy()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # The form of a state is that of a new one: so a copied or loaded optimizer needs to hold nothing else.
        return pytree.tree_unflatten(leaves, pytree.tree_structure(init(_array(param))))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's; but each array keeps its own dtype, a count of steps included."""
        super().load_state_dict(dict(state_dict))
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            held = state_dict["state"].get(number)
            if held is not None:
                self.state[param] = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}


def _frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _array(tensor: Tensor) -> Any:
    """The numbers of a tensor, not to be written to: arrays of this style never change."""
    return _frozen(tensor.detach().cpu().numpy().view())


def _held(leaf: Any) -> Any:
    try:
        return torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf
    except TypeError:  # a dtype that torch does not have
        return leaf
