"""The calls that a plan consists of, and the arrays that they work on.

An array is one memory in both libraries, and a call is a function of the number of the step, with everything else bound to it
beforehand. Scratch arrays come from a pool.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Call = Callable[[int], object]
# Of each step: a number, or a column, then shape (steps, rows, 1).
Values = list[float] | Tensor


class Array(NamedTuple):
    """One memory in both libraries: numpy has the cheaper calls, torch the fused and the broadcasting ones."""

    tensor: Tensor
    numpy: np.ndarray

    @classmethod
    def of(cls, tensor: Tensor) -> "Array":
        return cls(tensor, tensor.numpy())


class Uneven(Exception):
    """Configs would be walked in different ways; apart they can be."""


class Pool:
    """Scratch arrays of one shape."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.made: list[Array] = []
        self.free: list[Array] = []

    def clear(self) -> None:
        """Take back what was taken, and nothing that was only given."""
        self.free = list(self.made)

    def take(self) -> Array:
        if not self.free:
            self.made.append(Array.of(torch.empty(self.shape, dtype=self.dtype)))
            return self.made[-1]
        return self.free.pop()

    def give(self, array: Array) -> None:
        self.free.append(array)


# The calls. Arguments by position and names bound beforehand: these run some ten thousand times a second.


def of_numpy(function: Callable[..., object], *arrays: np.ndarray) -> Call:
    if len(arrays) == 2:
        a, out = arrays
        return lambda t: function(a, out)
    first, second, to = arrays
    return lambda t: function(first, second, to)


def scalar(function: Callable[..., object], a: np.ndarray, values: Values, out: np.ndarray) -> Call:
    numbers = list(values.numpy()) if isinstance(values, Tensor) else values
    return lambda t: function(a, numbers[t], out)


def of_torch(function: Callable[..., object], x: Tensor, out: Tensor) -> Call:
    return lambda t: function(x, out=out)


def copy(source: np.ndarray, to: np.ndarray) -> Call:
    return lambda t: np.copyto(to, source)


def fill(values: Values, out: np.ndarray) -> Call:
    numbers = list(values.numpy()) if isinstance(values, Tensor) else values
    return lambda t: np.copyto(out, numbers[t])


def vecdot(a: np.ndarray, b: np.ndarray, rows: list[np.ndarray]) -> Call:
    vecdot = np.vecdot
    return lambda t: vecdot(a, b, rows[t])


def add(base: Tensor, y: Tensor, values: Values, out: Tensor) -> Call:
    """Both forms round alike, so a config's walk does not depend on its company."""
    if isinstance(values, Tensor):
        columns = values.unbind(0)
        if base is out:
            return lambda t: out.addcmul_(y, columns[t])
        return lambda t: torch.addcmul(base, y, columns[t], out=out)
    if base is out:
        return lambda t: out.add_(y, alpha=values[t])
    return lambda t: torch.add(base, y, alpha=values[t], out=out)


def addcmul(base: Tensor, x: Tensor, y: Tensor, values: Values, out: Tensor) -> Call:
    if isinstance(values, Tensor):
        raise Uneven
    if base is out:
        return lambda t: out.addcmul_(x, y, value=values[t])
    return lambda t: torch.addcmul(base, x, y, value=values[t], out=out)
