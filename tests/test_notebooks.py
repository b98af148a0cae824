"""The notebooks are executed, each in a process of its own. The cells that a reader does not see hold the prose to the numbers."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import rwsim
from tests.forked import python

ROOT = Path(rwsim.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
# What the issue asks for.
TAUGHT = {
    "audit-an-optimizer", "plan-a-run", "sweep-and-heat-map", "train-with-an-rv", "verify-a-formula", "where-closed-forms-stop",
    "your-own-gradients", "your-own-rule",
}  # fmt: skip
# What ends a page: no picture is shown here, and none is left open.
_PROLOGUE = "import matplotlib.pyplot as plt\nplt.show = lambda: plt.close('all')\n"


def cells(text: str) -> list[str]:
    """The code of a MyST notebook, cell by cell, without their options."""
    return re.findall(r"^```\{code-cell\}[^\n]*\n(?::[^\n]*\n)*\n?(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def execute(text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    code = _PROLOGUE + "\n".join(cells(text))
    return subprocess.run([*python(), "-c", code], cwd=directory, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(notebook, tmp_path):
    done = execute(notebook.read_text(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not list(tmp_path.iterdir()), "a notebook prints, and leaves nothing behind"


def test_there_are_the_notebooks_that_were_asked_for():
    assert {notebook.stem for notebook in NOTEBOOKS} == TAUGHT


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_notebook_asks_sees_and_doubts(notebook):
    text = notebook.read_text()
    assert text.startswith("---\njupytext:\n") and "\nkernelspec:\n" in text
    assert "**Asked.**" in text and "**Seen**" in text.replace("Seen.", "Seen") and "**To doubt.**" in text
    assert "assert " in "".join(cells(text)), "nothing holds the prose to the numbers"
    assert len(cells(text)) == text.count("```{code-cell}")


def test_a_cell_that_fails_is_seen(tmp_path):
    done = execute("```{code-cell}\n:tags: [remove-cell]\n\nassert 1 == 2\n```\n", tmp_path)
    assert done.returncode == 1 and "AssertionError" in done.stderr
