"""One whole HTML document that makes no request."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from rwsim.page.html import Html, join, tag


@cache
def part(name: str) -> str:
    """A file of this room: ``style.css``, ``sort.js``."""
    return files("rwsim.page").joinpath(name).read_text(encoding="utf-8")


def page(
    title: str, body: Any, *, lead: Any = "", script: str = "", style: str = "", footer: Any = "", connect: bool = False,
) -> str:  # fmt: skip
    """A document with the shared style.

    Args:
        title: Of the document, and its h1.
        body: What goes into ``main``: headings from h2 on.
        lead: Under the title.
        script: JavaScript, run when the page is there.
        style: CSS beside the shared one.
        footer: At the end.
        connect: Whether the script may talk to the server that the page came from.

    Raises:
        ValueError: A script or style that would end its own element.

    Example:
        >>> "&lt;i&gt;" in page("<i>", "")
        True
    """
    sheet = f"\n{part('style.css')}{style}"
    for name, text in (("script", script), ("style", sheet)):
        if re.search(rf"</{name}|<!--", text, re.IGNORECASE):
            raise ValueError(f"a {name} must not hold </{name} or <!--")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}" if script else "script-src 'none'",
            f"style-src {_hash(sheet)}",
            "img-src data:",
            "connect-src " + ("'self'" if connect else "'none'"),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        # Without one a browser asks the server for favicon.ico.
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(sheet)),
    )
    content = join(
        tag("a", "Skip to the content", class_="skip", href="#main"),
        tag("header", tag("h1", title), lead),
        tag("main", body, id="main", tabindex="-1"),
        tag("footer", footer) if footer else None,
        Html(f"<script>{script}</script>") if script else None,
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{content}</body>\n</html>\n'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
