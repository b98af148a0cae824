"""A real browser for the tests of pages: Debian's chromium under playwright, axe for accessibility."""

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# What Debian and others call it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def _module(name: str) -> Any:
    """A module of the tests; what lacks it skips, except in CI, where the tests of pages must run."""
    return importlib.import_module(name) if _required() else pytest.importorskip(name, reason=f"{name} is not here: make test installs it")


def _required() -> bool:
    return os.environ.get("RWSIM_BROWSER") == "required"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, headless; a machine without it, or without playwright, skips the test."""
    api = _module("playwright.sync_api")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        (pytest.fail if _required() else pytest.skip)("no chromium here: `make browser` installs Debian's")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A page that was opened, and everything that went on since.

    Attributes:
        page: Of playwright.
        requests: Addresses asked for, data: aside.
        faults: Errors of the page and its console, dialogs, failed requests.
    """

    page: Any
    requests: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def sound(self, *allowed: str) -> None:
        """Nothing went wrong, and nothing was asked for but these addresses (each any number of times)."""
        assert not self.faults
        assert set(self.requests) <= set(allowed), "a request to elsewhere"

    def width(self) -> tuple[int, int]:
        """Of the content and of the window, in pixels: the first is larger if the page scrolls sideways."""
        return tuple(self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]"))

    def violations(self) -> list[str]:
        """What axe finds that is serious or critical, a line each."""
        found = _module("axe_playwright_python.sync_playwright").Axe().run(self.page).response["violations"]
        return [
            f"{one['id']} ({one['impact']}): {node['html'][:200]}: {node['failureSummary']}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """``visit(address or path, dark=False, width=1200, height=900)`` opens a page and watches it."""
    contexts = []

    def opened(where: str | Path, *, dark: bool = False, width: int = 1200, height: int = 900, **options: Any) -> Visit:
        context = browser.new_context(
            color_scheme="dark" if dark else "light", viewport={"width": width, "height": height}, reduced_motion="reduce", **options
        )
        contexts.append(context)
        seen = Visit(context.new_page())
        context.on("request", lambda request: None if request.url.startswith("data:") else seen.requests.append(request.url))
        context.on("requestfailed", lambda request: seen.faults.append(f"failed: {request.url}"))
        context.on("weberror", lambda error: seen.faults.append(f"page: {error.error}"))
        context.on("console", lambda said: seen.faults.append(f"console: {said.text}") if said.type in ("error", "warning") else None)

        def refuse(dialog: Any) -> None:
            seen.faults.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        seen.page.on("dialog", refuse)
        seen.page.goto(where.as_uri() if isinstance(where, Path) else where, wait_until="load")
        return seen

    yield opened
    for context in contexts:
        context.close()
