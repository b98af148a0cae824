"""Pages that are generated are up to date."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("readme", Path(__file__).parent.parent / "docs" / "readme.py")
assert spec is not None and spec.loader is not None
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)


@pytest.mark.parametrize("path", readme.FORMULAS, ids=lambda p: p.name)
def test_formulas_in_the_docs_are_those_derived(path):
    """After a change of a formula: `python docs/readme.py tables`."""
    assert readme.with_formulas(path) == path.read_text()


def test_missing_markers_are_named():
    with pytest.raises(ValueError, match="no markers for 'table 9'"):
        readme.fill("text", "table 9", "")
