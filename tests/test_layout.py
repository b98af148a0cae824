"""The house: what may import what, what loads when, what ships."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rwsim
from tests.forked import python

ROOT = Path(rwsim.__file__).parent
# One way only: a module may import from its own layer and from those to its left.
LAYERS = (
    "_door",
    "errors",
    "citation",
    "optimizers",
    "theory",
    "rotational",
    "walk",
    "stats",
    "config",
    "convert",
    "sweeps",
    "validate",
    "plan",
    "probe",
    "audit",
    "export",
    "experiments",
    "tables",
    "plots",
    "page",
    "explore",
    "report",
    "doctor",
    "schemas",
    "cli",
)
MODULES = sorted(ROOT.rglob("*.py"))
# Files of more than 400 lines, each with the reason why it is not split.
LONG = {
    "rwsim/plan.py": "a few lines over, one job: a plan and what it warns of",
    "rwsim/rotational/fused.py": "a few lines over, one job: what launches the kernels",
    "rwsim/rotational/optimizer.py": "one class, which the exported files carry whole",
    "rwsim/theory/equilibrium.py": "a few lines over, one job: the equilibrium of a rule, or of many",
    "rwsim/theory/full.py": "the corrections share the state of one iteration",
    "rwsim/validate.py": "a few lines over, one run: preparing, walking, judging",
    "rwsim/walk/fused.py": "one engine: what it lacks, its launches and their graphs",
    "tests/test_audit_lifecycle.py": "one table of faulty optimizers and the tests that loop over it",
    "tests/test_layers.py": "one table of layers and the tests that loop over it",
    "tests/test_plots_sweep.py": "all of them read one made-up sweep",
    "tests/test_reference.py": "the engine that the others must agree with, tested in one place",
    "tests/test_rotational.py": "one table of optimizers and the tests that loop over it",
    "tests/test_rotational_fused.py": "one set of launches and the tests that loop over it",
    "tests/test_rotational_torch.py": "one table of optimizers and the tests that loop over it",
    "tests/test_studies.py": "one small study and the tests that change it",
}
LONGEST = 400


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Absolute names a module imports, wherever in it; `if TYPE_CHECKING` blocks excluded."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = layer(path)
    if own == "__init__":
        return
    for name in imported(path):
        if name.startswith("rwsim."):
            other = name.split(".")[1]
            assert LAYERS.index(other) <= LAYERS.index(own), f"{own} must not import {name}"
    if own in ("optimizers", "theory"):
        assert not {n for n in imported(path) if n.split(".")[0] == "torch"}, "theory and optimizers never import torch"
    if own == "optimizers":
        assert not {n for n in imported(path) if n.split(".")[0] in ("sympy", "numpy", "scipy")}


def test_shapes_are_checked_wherever_they_are_annotated():
    options = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (checked,) = re.findall(r"--jaxtyping-packages=(\S+),beartype", options)
    shaped = {".".join(["rwsim", *path.relative_to(ROOT).with_suffix("").parts]) for path in MODULES if "jaxtyping" in imported(path)}
    assert shaped == set(checked.split(","))


def test_no_file_is_long_without_a_reason():
    top = ROOT.parent
    folders = ("rwsim", "tests", "benchmarks", "derivations", "docs")
    lines = {path.relative_to(top).as_posix(): len(path.read_text().splitlines()) for one in folders for path in (top / one).rglob("*.py")}
    assert {name for name, count in lines.items() if count > LONGEST} == set(LONG), "split it, or say here why not; or take it off the list"


def test_every_layer_is_named():
    assert {layer(p) for p in MODULES} <= {*LAYERS, "__init__"}


def test_import_is_light():
    code = "import time; t = time.perf_counter(); import rwsim; d = time.perf_counter() - t; import sys; print(d, *sys.modules)"
    seconds = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        seconds.append(float(out[0]))
        assert not {"torch", "sympy", "numpy", "scipy", "matplotlib", "pydantic", "cyclopts"} & set(out[1:])
    assert min(seconds) < 0.3


def test_door_survives_submodule_imports():
    code = "import rwsim.validate, rwsim; assert callable(rwsim.validate) and callable(rwsim.predict) and callable(rwsim.simulate)"
    subprocess.run([*python(), "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rwsim.nonsense  # noqa: B018 - the attribute access is what is tested
    assert {"convert", "predict", "simulate", "validate", "RULES"} <= set(dir(rwsim))


def test_version_and_changelog_agree():
    text = (ROOT.parent / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", text, re.M).group(1) == rwsim.__version__


def test_wheel_runs_in_an_empty_directory(tmp_path):
    """Built from the checkout, unpacked, used far from it: the package needs nothing that the wheel lacks."""
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT.parent)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name == f"rwsim-{rwsim.__version__}-py3-none-any.whl", "it must install without a compiler"
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    assert (site / "rwsim" / "py.typed").exists()
    code = "import rwsim, sys; assert rwsim.__file__.startswith(sys.argv[1]); from rwsim.cli import main; main(sys.argv[2:])"
    # PYTHONPATH wins over the editable install.
    arguments = ["validate", "--optimizer", "adamw", "--lr", "0.02", "--weight-decay", "2", "--betas", "0.9", "0.99", "--steps", "1500"]
    done = subprocess.run(
        [*python(), "-c", code, str(site), *arguments, "--neurons", "64"],
        cwd=empty, env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(empty)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {p.name for p in (empty / "rwsim-validate").iterdir()} == {"validation.json", "walk.csv", "walk.png"}


def test_make_and_ci_scripts_are_there():
    top = ROOT.parent
    assert (top / ".ci" / "run").stat().st_mode & 0o100
    assert re.search(r"^torch==2\.13\.0$", (top / "constraints.txt").read_text(), re.M)
