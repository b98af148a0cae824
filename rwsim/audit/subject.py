"""The optimizer under audit: how it is found, built and driven."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rwsim.errors import InvalidArgument

# Keywords under which optimizers take what rwsim calls by torch's name; a pair stands for the two averages.
ALIASES: Mapping[str, tuple[Any, ...]] = {
    "lr": ("lr", "learning_rate", "step_size", "eta", "alpha"),
    "weight_decay": ("weight_decay", "wd", "decay", "weight_decay_rate", "l2", "lambda_", "lam"),
    "momentum": ("momentum", "beta", "mu", "beta1"),
    "betas": ("betas", ("beta1", "beta2"), ("b1", "b2"), ("beta_1", "beta_2")),
    "eps": ("eps", "epsilon"),
    "dampening": ("dampening",),
    "nu": ("nu",),
    "mix": ("mix", "alpha"),
    "max_lr": ("max_lr", "lr_max", "peak_lr"),
}
PARAMS = ("params", "parameters", "param_groups", "named_parameters")


class SubjectError(Exception):
    """The optimizer under audit raised: `error` is its own exception."""

    def __init__(self, doing: str, error: BaseException) -> None:
        self.doing, self.error = doing, error
        message = " ".join(str(error).split())
        super().__init__(f"{doing} raises {type(error).__name__}: {message[:200]}")


def load(name: str) -> Any:
    """The object of ``MODULE:CLASS`` or ``FILE.py:CLASS``. Importing it runs its code.

    Raises:
        InvalidArgument: No such form, module, file or name in it, or it lacks a module that it imports.
        SubjectError: Importing it raised something else.
    """
    place, separator, attribute = name.rpartition(":")
    if not separator or not place or not attribute:
        raise InvalidArgument("optimizer", "must be MODULE:CLASS or FILE.py:CLASS", name, "for example torch.optim:AdamW")
    with suppress(OSError):  # a module that lies here is found, as by `python -m`
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except InvalidArgument:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or place
        remedy = "install it, or check the spelling" if place.startswith(missing) else f"install {missing}, which it imports"
        raise InvalidArgument("optimizer", "must name a module that can be imported", name, remedy) from None
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InvalidArgument("optimizer", f"must name a module that can be imported (ImportError: {reason})", name) from None
    except Exception as error:
        raise SubjectError(f"import of {place}", error) from error
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [n for n, v in vars(module).items() if inspect.isclass(v) and hasattr(v, "step")]
            remedy = f"it holds {', '.join(sorted(known)[:12])}" if known else "it holds no optimizer class"
            raise InvalidArgument("optimizer", f"must name a class of {place}", name, remedy) from None
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise InvalidArgument("optimizer", "must name a file that is there", str(path))
    name = f"rwsim_audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument("optimizer", "must name a Python file", str(path))
    module = importlib.util.module_from_spec(spec)
    # A dataclass, a pickle or a compiled function of the file looks its module up.
    sys.modules[name] = module
    # What lies beside the file may be imported by it, as when it is run.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


@dataclass(frozen=True)
class Subject:
    """An optimizer class with the keywords that the user pinned.

    Args:
        make: The class, or any function of parameters and keywords that returns an optimizer.
        name: What to call it, ``MODULE:CLASS`` where it has one.
        settings: Keywords that are passed at every construction.
    """

    make: Callable[..., Any]
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise InvalidArgument("optimizer", "must be an optimizer class", self.make, "name a class such as torch.optim:AdamW")
        if inspect.isclass(self.make) and not callable(getattr(self.make, "step", None)):
            raise InvalidArgument(
                "optimizer", "must be an optimizer class: it has no method `step`", self.name, "name a class such as torch.optim:AdamW"
            )
        for key in self.settings:
            if key not in self.keywords and not self.open_ended:
                raise InvalidArgument(f"set {key}", f"must be a keyword of {self.name}", key, f"it takes {', '.join(self.keywords)}")
        for key, parameter in self.keywords.items():
            if parameter.default is parameter.empty and key not in self.settings and self._meaning(key) is None:
                raise InvalidArgument(
                    "optimizer", f"has a constructor that needs `{key}`, which the audit cannot guess", self.name, f"pass --set {key}=VALUE"
                )

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.make)
        except (TypeError, ValueError):
            raise InvalidArgument("optimizer", "must have a signature that can be read", self.name, "wrap it in a function") from None

    @cached_property
    def open_ended(self) -> bool:
        """Whether the constructor swallows any keyword."""
        return any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())

    @cached_property
    def keywords(self) -> Mapping[str, inspect.Parameter]:
        """Keywords of the constructor beside the parameters, which come first."""
        parameters = list(self._signature.parameters.values())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if named and (named[0].name in PARAMS or named[0].default is named[0].empty):
            named = named[1:]
        found = {p.name: p for p in named}
        # **kwargs are handed to a base that is an optimizer with a learning rate of its own: that one's names are taken too.
        if self.open_ended and inspect.isclass(self.make):
            for base in self.make.__mro__[1:]:
                if base not in (object, torch.optim.Optimizer) and callable(getattr(base, "step", None)):
                    try:
                        inner = Subject(base, base.__name__).keywords
                    except InvalidArgument:
                        continue
                    if any(alias in inner for alias in ALIASES["lr"]):
                        return {**inner, **found}
        return found

    def _meaning(self, keyword: str) -> str | None:
        """The name of rwsim for a keyword of the constructor, or None."""
        for name in ALIASES:
            alias = self.spelling(name)
            if alias == keyword or (isinstance(alias, tuple) and keyword in alias):
                return name
        return None

    def spelling(self, name: str) -> Any:
        """The constructor's keyword (for averages, perhaps two) for a hyperparameter in rwsim's words, or None."""
        for alias in ALIASES.get(name, (name,)):
            if all(part in self.keywords for part in (alias if isinstance(alias, tuple) else (alias,))):
                return alias
        return None

    def pinned(self, name: str) -> Any:
        """The user's value of a hyperparameter in rwsim's words, or None."""
        alias = self.spelling(name)
        if isinstance(alias, tuple):
            values = tuple(self.settings.get(part) for part in alias)
            return None if None in values else values
        return self.settings.get(alias) if alias else None

    def arguments(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of the constructor for hyperparameters in rwsim's words; what it has no word for is left out."""
        found: dict[str, Any] = {}
        for name, value in hyper.items():
            alias = self.spelling(name)
            if alias is None:
                continue
            if isinstance(alias, tuple):
                found.update(zip(alias, value, strict=True))
            elif name == "betas" and len(value) == 2 and len(self._default(alias, ())) == 3:
                found[alias] = (*value, self._default(alias, ())[2])
            else:
                found[alias] = value
        return {**found, **self.settings}

    def _default(self, keyword: str, otherwise: Any) -> Any:
        value = self.keywords[keyword].default
        return value if isinstance(value, Sequence) else otherwise

    def build(self, params: Any, hyper: Mapping[str, Any], **extra: Any) -> Any:
        """An optimizer of these parameters, hyperparameters in rwsim's words, and further keywords of its own.

        Raises:
            SubjectError: Its constructor raised.
        """
        keywords = {**self.arguments(hyper), **extra}
        try:
            made = self.make(params, **keywords)
        except Exception as error:
            shown = ", ".join(f"{k}={v!r}" for k, v in keywords.items())
            raise SubjectError(f"construction with {shown}", error) from error
        if not callable(getattr(made, "step", None)):
            raise InvalidArgument("optimizer", "must return an optimizer: what it returned has no method `step`", self.name)
        return made

    def set_lr(self, optimizer: Any, lr: Any) -> None:
        """Change the learning rate as a scheduler does."""
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor) and not isinstance(lr, Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def walk(
        self, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor | None]], hyper: Mapping[str, Any], *,
        lrs: Sequence[float] | None = None, **extra: Any,
    ) -> list[list[Tensor]]:  # fmt: skip
        """Where given gradients take given parameters.

        Args:
            starts: Initial parameters.
            grads: For each step the gradient of each parameter, or None.
            hyper: Hyperparameters in rwsim's words.
            lrs: The learning rate of each step, set from outside; the constructor gets the first.
            extra: Further keywords of the constructor.

        Returns:
            Parameters after each step.

        Raises:
            SubjectError: Its constructor or its step raised.
        """
        params = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = self.build(params, {**hyper, "lr": lrs[0]} if lrs else hyper, **extra)
        path = []
        for step, now in enumerate(grads):
            if lrs is not None and step and lrs[step] != lrs[step - 1]:
                self.set_lr(optimizer, lrs[step])
            for param, grad in zip(params, now, strict=True):
                param.grad = None if grad is None else grad.to(param.dtype, copy=True)
            self.step(optimizer)
            path.append([param.detach().clone() for param in params])
        return path

    def step(self, optimizer: Any) -> None:
        """One step; its exception becomes a `SubjectError`."""
        try:
            optimizer.step()
        except Exception as error:
            raise SubjectError("step()", error) from error
