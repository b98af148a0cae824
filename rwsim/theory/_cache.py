"""functools.cache that keeps a function's signature for type checkers (theirs wants a Hashable where a class is given)."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


def cached(function: F) -> F:
    """Remember every result; arguments must be hashable."""
    return cast(F, cache(function))
