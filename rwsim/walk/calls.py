"""The calls that a plan consists of, and the arrays that they work on.

An array is one memory in both libraries, and a call is a function of the number of the step, with everything else bound to it
beforehand. Scratch arrays come from a pool.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import blas
from torch import Tensor

Call = Callable[[int], object]
# Elements that BLAS takes at a time; the rest of an array it may round otherwise. And so many it takes without threads of its own.
_UNROLLED, _ALONE = 64, 10_000
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
    if base is not out:
        return lambda t: torch.add(base, y, alpha=values[t], out=out)
    axpy, size, x, z = _axpy(out.dtype), out.numel(), y.numpy().reshape(-1), out.numpy().reshape(-1)
    apart = y is not out and y.shape == out.shape and y.is_contiguous() and out.is_contiguous()
    # 0 times what is not finite is nothing to BLAS.
    if axpy is None or size % (2 * _UNROLLED) or size > 2 * _ALONE or not apart or 0.0 in values:
        return lambda t: out.add_(y, alpha=values[t])
    if size <= _ALONE:
        return lambda t: axpy(x, z, size, values[t])
    half = size // 2
    (low, high), (to_low, to_high) = np.split(x, 2), np.split(z, 2)

    def halves(t: int) -> None:
        axpy(low, to_low, half, values[t])
        axpy(high, to_high, half, values[t])

    return halves


@cache
def _axpy(dtype: torch.dtype) -> Callable[..., object] | None:
    """BLAS's y += a x, whose call costs half as much as torch's, where both round alike: by one fused multiplication and addition."""
    kind, axpy = (np.float32, blas.saxpy) if dtype == torch.float32 else (np.float64, blas.daxpy)
    x, y = np.random.default_rng(0).standard_normal((2, 16 * _UNROLLED)).astype(kind)
    ours = torch.from_numpy(y.copy()).add_(torch.from_numpy(x), alpha=0.1).numpy()
    axpy(x, y, len(x), 0.1)
    return axpy if np.array_equal(ours, y) else None


def addcmul(base: Tensor, x: Tensor, y: Tensor, values: Values, out: Tensor) -> Call:
    if isinstance(values, Tensor):
        raise Uneven
    if base is out:
        return lambda t: out.addcmul_(x, y, value=values[t])
    return lambda t: torch.addcmul(base, x, y, value=values[t], out=out)
