"""What the command line says of itself: help with examples that are commands of rwsim, completion, citation, health."""

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rwsim
from rwsim import doctor
from rwsim.citation import PAPER, bibtex, cff
from rwsim.cli import FAILS, HOLDS, INTERNAL, USAGE, app, run
from tests.published import held

ROOT = Path(rwsim.__file__).parent.parent
COMMANDS = [name for name in app if not name.startswith("-")]
EXAMPLES = {name: [line.strip() for line in re.findall(r"^ *rwsim .*$", str(app[name].default_command.__doc__), re.M)] for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_shows_an_example(name, capsys):
    assert run([name, "--help"]) == HOLDS
    said = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert EXAMPLES[name] and set(EXAMPLES[name]) <= set(said)
    assert all(line.split()[1] == name and len(line) <= 78 for line in EXAMPLES[name]), "it would be wrapped, and not be a command any more"


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_is_a_command(line):
    tokens = shlex.split(line.partition(" > ")[0])[1:]
    command, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    assert command is app[tokens[0]].default_command and not bound.arguments.get("quiet")


def test_rejects_an_example_that_is_no_command(capsys):
    assert run(["plan", "--optimiser", "adamw"]) == USAGE
    assert "--optimizer" in capsys.readouterr().err


def test_completion_is_a_script_of_all_commands_and_needs_no_torch(tmp_path):
    code = "import sys; from rwsim.cli import run; assert run(['completion', 'bash']) == 0; assert 'torch' not in sys.modules"
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    (tmp_path / "script").write_text(script)
    ask = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rwsim; echo "${COMPREPLY[@]}"'

    def completed(*words: str) -> list[str]:
        done = subprocess.run(["bash", "-c", ask, str(tmp_path / "script"), "rwsim", *words], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert set(COMMANDS) <= set(completed(""))
    assert completed("validate", "--gr") == ["--gradient"]
    assert completed("validate", "--engine", "") == ["auto", "reference", "blocked", "fused"]


def test_completion_installs_where_the_shell_looks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert run(["completion", "fish", "--install"]) == HOLDS
    assert "complete -c rwsim" in (tmp_path / ".config" / "fish" / "completions" / "rwsim.fish").read_text()
    assert str(tmp_path) in capsys.readouterr().out
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert run(["completion", "fish", "--install"]) == INTERNAL
    assert re.fullmatch(r"rwsim: error: cannot install the completion of fish: .*\n", capsys.readouterr().err)


def test_completion_of_an_unknown_shell_is_refused(monkeypatch, capsys):
    from cyclopts.completion import detect

    def unknown() -> str:
        raise detect.ShellDetectionError("none")

    monkeypatch.setattr(detect, "detect_shell", unknown)
    assert run(["completion"]) == USAGE
    assert (
        capsys.readouterr().err
        == "rwsim: error: `shell` must be named where it cannot be told, got None; for example rwsim completion bash.\n"
    )


# Citation.


def test_the_citation_file_is_what_cite_prints(capsys):
    assert run(["cite", "--format", "cff"]) == HOLDS
    assert capsys.readouterr().out == (ROOT / "CITATION.cff").read_text() == cff()


def test_the_citation_file_holds_what_its_format_asks_for():
    yaml = pytest.importorskip("yaml", reason="dask brings it")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(found) and found["cff-version"] == "1.2.0"
    assert found["version"] == rwsim.__version__ and found["license"] == "MIT" and found["type"] == "software"
    known = {"cff-version", "message", "type", "title", "version", "license", "authors", "keywords", "references"}
    assert set(found) == known, "the schema of the format allows no other keys: look there before adding one"
    (paper,) = found["references"]
    assert [(one["given-names"], one["family-names"]) for one in paper["authors"]] == list(PAPER["authors"])
    assert {"type", "title", "authors"} <= set(paper) and paper["year"] == 2024


def test_bibtex(capsys):
    assert run(["cite", "adamw"]) == HOLDS
    out = capsys.readouterr().out
    assert out.startswith(bibtex()) and out.splitlines()[-1].startswith("% adamw: Loshchilov and Hutter 2019")
    assert out.count("@") == 2 and out.count("{") == out.count("}") and f"version = {{{rwsim.__version__}}}" in out
    assert "Kosson, Atli and Messmer, Bettina and Jaggi, Martin" in out
    assert run(["cite", "nonsense"]) == USAGE


# Health.


def test_doctor_says_what_is_here(tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.chdir(tmp_path)
    assert run(["doctor", "--json", "deep/health.json"]) == HOLDS
    out = capsys.readouterr().out
    found = held("doctor", tmp_path / "deep" / "health.json")
    assert found["rwsim"] == rwsim.__version__ and found["packages"]["torch"] == importlib.metadata.version("torch")
    assert {"numpy", "sympy", "torch", "triton"} <= set(found["packages"]) and found["passed"] and out.endswith("rwsim validate\n")
    assert len(found["gpus"]) == torch.cuda.device_count() and found["threads"] == torch.get_num_threads()
    assert [name for name, missing in found["extras"].items() if name == "sweep" and not missing] == ["sweep"]
    assert f"numpy {found['packages']['numpy']}" in out
    assert {path.name for path in tmp_path.iterdir()} == {"deep"}


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no GPU")
@pytest.mark.gpu
def test_doctor_walks_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctor.examine()
    assert found.triton == "compiles" and found.gpus[0].memory > 2**30 and not found.troubles


def test_doctor_names_the_remedy(tmp_path, monkeypatch, capsys):
    """An old numpy, a walk that breaks, a place that cannot be written to: all are told, with what helps."""
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: {"numpy": "1.26.4", "triton": None}.get(name, version(name)))
    monkeypatch.setattr(rwsim, "simulate", lambda *given, **options: 1 / 0)
    monkeypatch.chdir("/proc")
    assert run(["doctor"]) == FAILS
    out = capsys.readouterr().out
    assert "PROBLEM: numpy>=2.0 is needed, 1.26.4 is here; pip install 'numpy>=2.0'\n" in out
    assert "PROBLEM: a walk on the CPU fails: ZeroDivisionError: division by zero; install rwsim again" in out
    assert "Triton    is not here" in out and out.endswith("see the problems above\n")
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert run(["doctor", "--quiet"]) == FAILS
    assert any("cannot be written to" in trouble.what and trouble.fatal for trouble in doctor.examine().troubles)


def test_requirements_are_read_as_they_are_written(monkeypatch):
    class Installed:
        requires = ["numpy>=2.0", "torch", 'dask[distributed]>=2024.8; extra == "cluster"', "xarray>=2024.7 ; extra == 'sweep'"]

        def read_text(self, name):
            return '{"dir_info": {"editable": true}, "url": "file:///x"}' if name == "direct_url.json" else None

    monkeypatch.setattr(doctor.importlib.metadata, "distribution", lambda name: Installed())
    needed, extras, editable = doctor._requirements()
    assert needed == {"numpy": "2.0", "torch": ""} and extras == {"cluster": ["dask"], "sweep": ["xarray"]} and editable
    assert doctor._numbers("2.13.0+cpu") == [2, 13, 0] and doctor._numbers("2.9") < doctor._numbers("2.13.0+cpu")
