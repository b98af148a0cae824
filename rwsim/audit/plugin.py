"""The pytest plugin: a fixture and a marker that fail a test with the diagnosis. It loads nothing until one is used."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rwsim.audit.finding import Report

_MARKER = (
    "rwsim(law=None, *, probes=(), seed=0, compiled=False, seconds=60, settings={}, **settings): hold the optimizer class that the test "
    "returns (or that the attribute `optimizer` of its test class names) against a law; the test fails with the diagnosis"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def rwsim_audit() -> "Callable[..., Report]":
    """Call it with an optimizer class and a law, ``rwsim_audit(MyAdamW, law="adamw", amsgrad=True)``.

    The test fails, with the diagnosis as its message, if the audit does not pass; else the report is returned. Keywords that
    are not `rwsim.audit`'s go to the optimizer's constructor.
    """
    return held


def held(
    optimizer: Any, law: Any = None, *, probes: Sequence[str] = (), seed: int = 0, compiled: bool = False, seconds: float = 60.0,
    settings: dict[str, Any] | None = None, **more: Any,
) -> "Report":  # fmt: skip
    """Audit; fail the running test if it does not pass."""
    __tracebackhide__ = True
    import rwsim
    from rwsim.audit.render import lines
    from rwsim.errors import RwsimError

    try:
        report = rwsim.audit(
            optimizer, law, settings={**(settings or {}), **more}, probes=probes, seed=seed, compiled=compiled, seconds=seconds
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
    except RwsimError as error:
        pytest.fail(f"rwsim cannot audit this: {error}", pytrace=False)
    if not report.passed:
        pytest.fail("\n".join(lines(report)), pytrace=False)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a marked test, and audit the class that it returns."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("rwsim")
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    optimizer = pyfuncitem.obj(**arguments)
    if optimizer is None:
        optimizer = getattr(pyfuncitem.instance, "optimizer", None)
    if optimizer is None:
        pytest.fail("a test marked `rwsim` must return the optimizer class, or be in a class whose `optimizer` names it", pytrace=False)
    held(optimizer, *marker.args, **marker.kwargs)
    return True
