"""HTML built from Python values: whatever is not marked as HTML is escaped."""

import html
import json
import re
from collections.abc import Iterable
from typing import Any

# What a reader cannot see, or what turns the order of what he sees: control characters, surrogates without their other half, bidi marks.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "wbr"})


class Html(str):
    """Text that is HTML already. Whatever is done to it as a `str` gives a plain one, which is escaped again: safe by default."""

    __slots__ = ()


def escape(value: Any) -> Html:
    """Text that shows `value` and does nothing; `Html` as it is.

    Example:
        >>> escape('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
        >>> escape("a\\u202eb")
        'a⟨U+202E⟩b'
    """
    if isinstance(value, Html):
        return value
    return Html(html.escape(_UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(value))))


def join(*parts: Any) -> Html:
    """Everything after each other; iterables are walked through, None is nothing."""
    return Html("".join(_pieces(parts)))


def _pieces(parts: Iterable[Any]) -> Iterable[str]:
    for part in parts:
        if part is None:
            continue
        if isinstance(part, str) or not isinstance(part, Iterable):
            yield escape(part)
        else:
            yield from _pieces(part)


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element.

    Args:
        name: Of the element.
        *children: Text is escaped, `Html` is not; iterables are walked through, None is nothing.
        **attributes: ``class_`` is class, ``aria_label`` aria-label. True: an attribute without value; None, False: none.

    Example:
        >>> tag("p", "1 < 2 ", tag("b", "so"), class_="note", hidden=True)
        '<p class="note" hidden>1 &lt; 2 <b>so</b></p>'
    """
    said = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        said.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    if name in _VOID:
        return Html(f"<{name}{''.join(said)}>")
    return Html(f"<{name}{''.join(said)}>{join(*children)}</{name}>")


def data(ident: str, value: Any) -> Html:
    """JSON for a script of the page: a block that no browser runs, and that no text in it can end.

    Raises:
        ValueError: NaN or infinity: JSON has none.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(f'<script type="application/json" id="{escape(ident)}">{text}</script>')
