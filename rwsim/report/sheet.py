"""What every report has: verdict, summary, sections, provenance, command; and its page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rwsim.page.document import page
from rwsim.page.html import Html, join, tag
from rwsim.page.scale import SPACE, number, percent
from rwsim.page.table import SORT, Cell

# Tone of a verdict, and how it is said without colour.
GOOD, BAD, UNSURE, PLAIN = "good", "bad", "unsure", ""


@dataclass(frozen=True)
class Sheet:
    """A report before it is a page.

    Attributes:
        title: Names the result.
        tone: ``good``, ``bad``, ``unsure``, or nothing where there is no verdict.
        verdict: What came of it, in a sentence.
        summary: Paragraphs.
        sections: Headings and what stands under them.
        facts: Provenance: names and values; None: not recorded.
        command: What repeats it; may be empty.
        remark: Beside the command.
    """

    title: str
    tone: str
    verdict: str
    summary: Sequence[Any]
    sections: Sequence[tuple[str, Any]]
    facts: Sequence[tuple[str, Any]]
    command: str = ""
    remark: str = ""


def render(sheet: Sheet, version: str) -> str:
    """One self-contained page."""
    sections = [*sheet.sections, ("Provenance", facts(sheet.facts)), ("Repeat it", _command(sheet))]
    links = [tag("li", tag("a", heading, href=f"#part-{i}")) for i, (heading, _) in enumerate(sections)]
    lead = join(
        tag("p", _tied(sheet.verdict), class_=f"verdict {sheet.tone}".strip()),
        [tag("p", _tied(paragraph)) for paragraph in sheet.summary],
        tag("nav", tag("ul", links, class_="contents"), aria_label="Contents"),
    )
    body = [join(tag("h2", heading, id=f"part-{i}"), content) for i, (heading, content) in enumerate(sections)]
    footer = f"Written by rwsim report {version}. Everything on this page is in it: it asks for nothing."
    return page(sheet.title, body, lead=lead, script=SORT, footer=footer)


def _tied(text: Any) -> Any:
    """Percent signs stay on the line of their number."""
    return text if isinstance(text, Html) else str(text).replace(" %", f"{SPACE}%")


def _command(sheet: Sheet) -> Html:
    return join(
        tag("pre", tag("code", sheet.command), tabindex="0", role="region", aria_label="Command") if sheet.command else None,
        tag("p", sheet.remark) if sheet.remark else None,
    )


def facts(pairs: Sequence[tuple[str, Any]]) -> Html:
    """Names and values; what is not known says so."""
    return tag("dl", [(tag("dt", name), tag("dd", said(value))) for name, value in pairs], class_="facts")


def said(value: Any) -> Any:
    """A value of a setting as text."""
    if value is None or value == "":
        return tag("span", "not recorded", class_="soft")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {said(one)}" for key, one in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(said(one)) for one in value) or "none"
    return value


def num(value: float | int | None, digits: int = 4) -> Cell:
    """A number's cell."""
    return Cell(number(value, digits), value)


def pct(value: float | int | None, sign: bool = True) -> Cell:
    """A relative error's cell."""
    return Cell(percent(value, sign), value)


def tone(text: str, tone: str) -> Cell:
    """A verdict's cell."""
    return Cell(tag("span", text, class_=tone or None))


def figures(*drawn: Html | None, pairs: bool = False) -> Html:
    """Figures side by side, as many as there is room for, or two."""
    return tag("div", [one for one in drawn if one is not None], class_="figures pairs" if pairs else "figures")


def note(*text: Any) -> Html:
    """Small print."""
    return tag("p", *text, class_="soft small")


def plural(count: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Example:
        >>> plural(1, "point"), plural(1200, "point")
        ('1 point', '1,200 points')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def cut(text: str, most: int) -> str:
    """At most so many characters of a label: its two ends, which tell layers apart."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[most // 2 + 1 - most :]}"


def known(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)
