"""Packages that load what is asked for when it is asked for."""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class _Door(ModuleType):
    """A package whose public names come from its submodules, at first use.

    Importing a submodule must not hide a public name that it shares its own with: `rwsim.validate` is the function.
    """

    _lazy: Mapping[str, str]

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self._lazy and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._lazy:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self._lazy[name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._lazy})


def make_door(package: str, lazy: Mapping[str, str]) -> None:
    """Make a package that is being imported a door: public name -> the submodule that holds it."""
    module = sys.modules[package]
    vars(module)["_lazy"] = lazy
    module.__class__ = _Door
