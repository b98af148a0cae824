"""What an optimizer is to rwsim: hyperparameter names, state names and ONE pure `update`.

`update` is written in ordinary operators. Evaluated on sympy symbols it yields the theory, on tensors the reference
engine and the oracle that every fast path is tested against. Whatever else is known of a rule (decay placement,
momentum kernel, kind of direction) is read off `update`, never declared beside it.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from rwsim.errors import InvalidArgument


class Domain(NamedTuple):
    """Legal interval of a hyperparameter: `low` <= value < `high`, or <= `high` where the end is `closed`."""

    low: float
    high: float
    remedy: str
    closed: bool = False


# torch's names. A rule may use a name that is not listed here: it must then be finite, nothing else.
DOMAINS: Mapping[str, Domain] = MappingProxyType(
    {
        "lr": Domain(0.0, math.inf, "give a finite learning rate such as 1e-3"),
        "weight_decay": Domain(0.0, math.inf, "give a finite decay such as 1e-2"),
        "momentum": Domain(0.0, 1.0, "give a momentum below 1 such as 0.9"),
        "betas": Domain(0.0, 1.0, "give averages below 1 such as 0.9 0.999"),
        "eps": Domain(0.0, math.inf, "give a small constant such as 1e-8, or 0"),
        "dampening": Domain(0.0, 1.0, "give a share of the gradient to hold back, such as 0.9"),
        "nu": Domain(0.0, 1.0, "give a share between 0 (no momentum) and 1", closed=True),
        "max_lr": Domain(1e-300, math.inf, "give the peak of the learning rate schedule"),
    }
)


def _number(label: str, value: Any, domain: Domain | None) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgument(label, "must be a number", value, "give one such as 0.1") from None
    low, high, remedy, closed = domain or Domain(-math.inf, math.inf, "give a finite number")
    if not (low <= number < high or (closed and number == high)) or not math.isfinite(number):
        left, right = "(" if low == -math.inf else "[", "]" if closed else ")"
        raise InvalidArgument(label, f"must lie in {left}{low:g}, {high:g}{right}", value, remedy)
    return number


class UpdateRule:
    """One optimizer: subclasses are pure data plus `update`, one room each.

    Class attributes:
        name: Registry name, e.g. ``"adamw"``.
        hyper: Hyperparameter names and defaults in torch's words; ``...`` marks one that must be given. Ranges come
            from `DOMAINS`.
        state: Names of the optimizer's buffers. All start at zero.
        reference: Where the rule is published.

    Instances hold validated values in `values` (a namespace, e.g. ``rule.values.lr``).

    Raises:
        InvalidArgument: A value out of range, a missing or an unknown hyperparameter.

    Example:
        >>> from rwsim.optimizers import AdamW
        >>> AdamW(lr=1e-3, weight_decay=0.1).values.betas
        (0.9, 0.999)
    """

    name: ClassVar[str]
    hyper: ClassVar[Mapping[str, Any]]
    state: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str] = ""

    def __init__(self, **hyper: Any) -> None:
        unknown = [key for key in hyper if key not in self.hyper]
        if unknown:
            raise InvalidArgument(
                unknown[0], f"is not a hyperparameter of {self.name}", hyper[unknown[0]], f"it takes {', '.join(self.hyper)}"
            )
        values: dict[str, Any] = {}
        for key, default in self.hyper.items():
            value = hyper.get(key, default)
            if value is ...:
                raise InvalidArgument(key, f"must be given for {self.name}", None, DOMAINS[key].remedy if key in DOMAINS else "")
            values[key] = self._validated(key, value, default)
        self.values = SimpleNamespace(**values)

    @classmethod
    def each(cls, configs: Iterable[Mapping[str, Any]]) -> "list[UpdateRule]":
        """The rules of many configs that name the same hyperparameters, as by the constructor; a value is validated once.

        Example:
            >>> from rwsim.optimizers import SGD
            >>> SGD.each({"lr": lr, "weight_decay": 0.1} for lr in (1, 2))
            [SGD(lr=1.0, weight_decay=0.1), SGD(lr=2.0, weight_decay=0.1)]
        """
        rules: list[UpdateRule] = []
        known: dict[tuple[str, Any], Any] = {}
        names: Any = None
        for config in configs:
            if config.keys() != names or cls.__init__ is not UpdateRule.__init__:
                rules.append(cls(**config))
                names, base = config.keys(), vars(rules[-1].values)
                continue
            values = dict(base)
            for item in config.items():
                if item not in known:
                    key, value = item
                    known[item] = cls._validated(key, value, cls.hyper[key])
                values[item[0]] = known[item]
            rule = cls.__new__(cls)
            rule.values = SimpleNamespace(**values)
            rules.append(rule)
        return rules

    @staticmethod
    def _validated(key: str, value: Any, default: Any) -> Any:
        domain = DOMAINS.get(key)
        if not isinstance(default, tuple):
            return _number(key, value, domain)
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise InvalidArgument(key, f"must hold {len(default)} numbers", value, f"the default is {default}")
        items = tuple(value)
        if len(items) != len(default):
            raise InvalidArgument(key, f"must hold {len(default)} numbers", value, f"the default is {default}")
        return tuple(_number(f"{key}[{i}]", item, domain) for i, item in enumerate(items))

    @staticmethod
    def update(grad: Any, state: SimpleNamespace, hyper: SimpleNamespace, xp: Any) -> dict[str, Any]:
        """One step of the optimizer.

        Args:
            grad: Gradient of the loss at `state.param`, any shape.
            state: `param`, every name of the class attribute `state`, and `step` (1 at the first step).
            hyper: The hyperparameters; each entry a number, a symbol, or a tensor that broadcasts against `grad`.
            xp: Supplies the functions that operators cannot write: ``sqrt`` and ``sign`` (the torch module is one).

        Returns:
            The new `param` and buffers. Nothing is changed in place.
        """
        raise NotImplementedError("a rule must define `update`")  # reached only by a subclass without one

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in vars(self.values).items())})"


def registry(rules: Iterable[type[UpdateRule]]) -> Mapping[str, type[UpdateRule]]:
    """A read-only mapping name -> rule that refuses two rules of one name."""
    table: dict[str, type[UpdateRule]] = {}
    for rule in rules:
        if rule.name in table:
            raise ValueError(f"two rules are named {rule.name!r}: {table[rule.name].__name__} and {rule.__name__}")
        table[rule.name] = rule
    return MappingProxyType(table)
