"""Numbers as text, ticks, and places on an axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# A unit stays on the line of its number.
SPACE = "\N{NO-BREAK SPACE}"
MISSING, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


def number(value: float | int | None, digits: int = 4) -> str:
    """A number in a table: `digits` significant ones.

    Example:
        >>> number(0.0071931), number(15000), number(-2.5e-7), number(None)
        ('0.007193', '15,000', '−2.5e−7', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if isinstance(value, int) or (value == int(value) and 1000 <= abs(value) < 1e6):
        return f"{int(value):,}".replace("-", MINUS)
    text = f"{value:,.{digits}g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", MINUS)


def percent(value: float | int | None, sign: bool = True) -> str:
    """A relative error: three decimals below 0.1 %, two below 10 %, one below 100 %, none above.

    Example:
        >>> [percent(x).replace(SPACE, " ") for x in (0.00194, -0.1321, 1.42, None)]
        ['+0.19 %', '−13.2 %', '+142 %', '–']
    """
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(100 * value)
    places = 3 if size < 0.0995 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    text = f"{100 * value:{'+' if sign else ''},.{places}f}"
    if sign and float(text.replace(",", "")) == 0:
        text = text.lstrip("+-")
    return f"{text.replace('-', MINUS)}{SPACE}%"


def share(value: float | int) -> str:
    """A share or a margin that was set, as it was set.

    Example:
        >>> [share(x).replace(SPACE, " ") for x in (0.01, -0.005)]
        ['1 %', '−0.5 %']
    """
    return f"{100 * value:.4g}{SPACE}%".replace("-", MINUS)


@dataclass(frozen=True)
class Scale:
    """From values to places.

    Attributes:
        low, high: Values at the ends; low > 0 on a log scale.
        start, end: Their places.
        log: Whether the scale is logarithmic.
    """

    low: float | int
    high: float | int
    start: float | int
    end: float | int
    log: bool = False

    def __call__(self, value: float | int) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float | int) -> bool:
        """Whether a value has a place: finite, and positive on a log scale."""
        return math.isfinite(value) and (value > 0 or not self.log)


def span(values: Sequence[float | int], log: bool = False, zero: bool = False, room: float = 0.05) -> tuple[float, float]:
    """Ends of an axis for these values, some room about them, never equal.

    Example:
        >>> span([1.0, 3.0], room=0.1)
        (0.8, 3.2)
    """
    known = [float(v) for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not known:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(known), max(known)
    if log:
        low, high = math.log(low), math.log(high)
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    # What differs by rounding alone is one value.
    if high - low <= (0.01 if log else 1e-3 * max(abs(low), abs(high))):
        more = 0.2 if log else 0.02 * abs(high) or 0.5
        low, high = low - more, high + more
    else:
        low, high = low - room * (high - low) * (low != 0 or log), high + room * (high - low) * (high != 0 or log)
    return (math.exp(low), math.exp(high)) if log else (low, high)


def ticks(low: float | int, high: float | int, log: bool = False, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most `most`.

    Example:
        >>> ticks(0, 1), ticks(1e-4, 2e-1, log=True)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0001, 0.001, 0.01, 0.1])
    """
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for mantissas in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**e for e in range(first, last + 1) for m in mantissas if low * 0.9999 <= m * 10.0**e <= high * 1.0001]
            if len(found) <= most:
                if len(found) >= 2:
                    return [float(f"{x:.3g}") for x in found]
                break
        else:
            every = -(-len(found) // most)
            return [float(f"{x:.3g}") for x in found if round(math.log10(x)) % every == 0]
    size = 10.0 ** math.floor(math.log10(high - low) - 1)
    for step in (m * size for m in (1, 2, 2.5, 5, 10, 20, 25, 50)):
        count = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if len(count) <= most:
            break
    return [float(f"{i * step:.12g}") for i in count]


def tick_texts(values: Sequence[float | int]) -> list[str]:
    """Labels of an axis' ticks, all as decimals or all as powers of ten.

    Example:
        >>> tick_texts([0.01, 0.02]), tick_texts([1e-4, 1e-3]), tick_texts([0, 2e6])
        (['0.01', '0.02'], ['10⁻⁴', '10⁻³'], ['0', '2×10⁶'])
    """
    plain = all(value == 0 or 1e-3 * 0.9999 <= abs(value) < 1e5 for value in values)
    return [_plain(value) if plain or value in (0, 1, 10) else _power(value) for value in values]


def _plain(value: float | int) -> str:
    return f"{value:,.10g}".replace("-", MINUS)


def _power(value: float | int) -> str:
    exponent = math.floor(math.log10(abs(value)) + 1e-12)
    mantissa = f"{value / 10.0**exponent:.3g}".replace("-", MINUS)
    power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
    return power if mantissa == "1" else f"{mantissa}{TIMES}{power}"
