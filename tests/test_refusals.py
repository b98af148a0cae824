"""What is refused is refused at once and in one line, with a remedy, whichever the command."""

import ast
import time
from pathlib import Path

import pytest

import rwsim
from rwsim.cli import USAGE, run

ROOT = Path(rwsim.__file__).parent
HUGE = str(10**24)
PLAN = ["plan", "--optimizer", "adamw", "--lr", "0.01", "--weight-decay", "0.1", "--steps", "100"]
SWEEP = ["sweep", "--optimizer", "adamw", "--axis", "lr=0.1,0.2", "--weight-decay", "1"]
CONVERT = ["convert", "--from", "adamw", "--lr", "0.01", "--weight-decay", "0.1", "--to", "lion"]
# Each with a place that is a directory, lies below a file, cannot be written to.
WRITES = {
    "validate": ["validate"], "derive": ["derive", "sgd"], "sweep": SWEEP, "plan": PLAN, "convert": CONVERT,
    "audit": ["audit", "torch.optim:SGD"], "export": ["export", "sgd", "-o", "x.py"], "verify": ["verify", "x.py"],
    "experiment": ["experiment", "dynamics"], "doctor": ["doctor"],
}  # fmt: skip


def refused(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The line; it takes no time, and leaves nothing behind."""
    before, began = sorted(Path().iterdir()), time.process_time()
    assert run(arguments) == USAGE
    out, err = capsys.readouterr()
    assert err.startswith("rwsim: error: ") and err.count("\n") == 1 and out == ""
    assert sorted(Path().iterdir()) == before and time.process_time() - began < 20, "imports take up to ten seconds"
    return err


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    yield
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", WRITES)
def test_odd_places_for_json_are_refused_before_the_work(command, capsys):
    arguments = WRITES[command]
    assert "`--json` must be a file" in refused([*arguments, "--json", "folder"], capsys)
    assert "below the file" in refused([*arguments, "--json", "file/x.json"], capsys)
    assert "`--json` must be writable (" in refused([*arguments, "--json", "/proc/x.json"], capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PLAN, "--steps", HUGE], "`steps` must lie in [1, 100,000,000]"),
        ([*PLAN, "--fan-in", HUGE], "`fan_in` must be at most 10,000,000"),
        ([*PLAN, "--warmup", HUGE], "`warmup` must lie in [0, 100), the steps of the run"),
        ([*CONVERT, "--fan-in", HUGE], "`fan_in` must be at most 10,000,000"),
        ([*SWEEP, "--steps", HUGE], "`steps` must be less than or equal to 1000000000"),
        ([*SWEEP, "--layers", HUGE], "`layers` must be less than or equal to"),
        ([*SWEEP, "--window", HUGE], "`window` must be less than or equal to"),
        (["derive", "sgd", "--order", HUGE], "`order` must lie in [1, 12]"),
        ([*PLAN, "--steps", "1e24"], "must be a whole number, got '1e24'"),
        ([*SWEEP, "--steps", "1e24"], "must be a whole number, got '1e24'"),
    ],
)
def test_numbers_beyond_any_use_are_refused_before_the_work(arguments, said, capsys):
    if "--steps" in arguments[-2:]:
        arguments = [one for i, one in enumerate(arguments) if one != "100" and not (one == "--steps" and i < len(arguments) - 2)]
    line = refused(arguments, capsys)
    assert said in line and "; " in line.partition("got")[2]


def test_no_memory_is_a_line(monkeypatch, capsys):
    def full(*given, **options):
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr(rwsim, "validate", full)
    assert run(["validate"]) == USAGE
    assert capsys.readouterr().err == ("rwsim: error: not enough memory (Unable to allocate 1 TiB); take fewer steps, neurons or fan-in\n")


# Of which the rule does not say already what would be right.
RANGES = ("must be at least", "must be at most", "must lie in", "must be a number", "must be a whole number", "must be finite")


def without_remedy(text: str) -> list[int]:
    """Lines of refusals of a number that do not say what to do instead."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "InvalidArgument" and len(node.args) == 3:
            rule = ast.unparse(node.args[1])
            if not node.keywords and any(words in rule for words in RANGES):
                lines.append(node.lineno)
    return lines


def test_every_range_has_a_remedy():
    # The probe and the experiments are not there yet.
    texts = {path.relative_to(ROOT): path.read_text() for path in ROOT.rglob("*.py")}
    raising = {path: text for path, text in texts.items() if "InvalidArgument(" in text and path.parts[0] not in ("probe", "experiments")}
    assert len(raising) > 30
    assert not {path: lines for path, text in raising.items() if (lines := without_remedy(text))}
    assert without_remedy('raise InvalidArgument("lr", "must lie in [0, 1)", lr)') == [1]
