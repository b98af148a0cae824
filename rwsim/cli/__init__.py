"""The command line. Exit 0 = holds, 1 = does not hold or undecided, 2 = bad usage, 3 = internal error or interrupted."""

import os
import sys
import traceback

from cyclopts import App, CycloptsError

from rwsim import __version__
from rwsim.cli.audit import audit
from rwsim.cli.cite import cite
from rwsim.cli.completion import completion
from rwsim.cli.convert import convert
from rwsim.cli.derive import derive
from rwsim.cli.doctor import doctor
from rwsim.cli.experiment import experiment
from rwsim.cli.explore import explore
from rwsim.cli.export import export, verify
from rwsim.cli.plan import plan
from rwsim.cli.report import report
from rwsim.cli.schema import schema
from rwsim.cli.shared import FAILS, HOLDS, INTERNAL, USAGE, refuse
from rwsim.cli.sweep import sweep
from rwsim.cli.validate import validate
from rwsim.errors import (
    ExportRefused,
    InvalidArgument,
    NoEquilibrium,
    RwsimError,
    Unavailable,
    UnsupportedRule,
    WalkInterrupted,
    WalkStopped,
)

__all__ = ["FAILS", "HOLDS", "INTERNAL", "USAGE", "app", "main", "run"]

app = App(
    name="rwsim", version=__version__, help="A random-walk laboratory for optimizers with weight decay.",
    print_error=False, exit_on_error=False, suppress_keyboard_interrupt=False, result_action="return_value",
)  # fmt: skip
COMMANDS = (
    validate, derive, sweep, plan, convert, audit, export, verify, experiment, report, explore, doctor, cite, schema, completion,
)  # fmt: skip
for command in COMMANDS:
    app.command(command)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: every way out has its exit status, and bad usage is one line on stderr."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Like `main`, returning the exit status."""
    try:
        result = app(arguments)
        return result if isinstance(result, int) else HOLDS
    except (CycloptsError, InvalidArgument, NoEquilibrium, Unavailable, UnsupportedRule) as error:
        return refuse(error, USAGE)
    except ExportRefused as error:
        return refuse(error, FAILS)
    except WalkStopped as error:
        return refuse(error, INTERNAL if isinstance(error, WalkInterrupted) else FAILS)
    except RwsimError as error:
        return refuse(error, INTERNAL)
    except KeyboardInterrupt:
        return refuse("interrupted", INTERNAL)
    except BrokenPipeError:
        # The reader of our output went away; say nothing more to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except MemoryError as error:
        return refuse(f"not enough memory ({error or 'none left'}); take fewer steps, neurons or fan-in", USAGE)
    except Exception as error:
        traceback.print_exc()
        return refuse(f"internal error: {type(error).__name__}: {error}", INTERNAL)
