"""What the commands that train share: usage errors in one line, exit statuses, the device, CSV."""

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import report
from rwsim.errors import InvalidArgument, RwsimError, Unavailable
from rwsim.walk.simulate import resolve_device


class Parser(argparse.ArgumentParser):
    """Takes ``--device auto|cpu|cuda`` and complains in one line."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(prog=f"python -m {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.name = name
        self.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA where there is one")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.name}: error: {message}\n")

    def run(self, work: Callable[[argparse.Namespace], object], arguments: Sequence[str]) -> int:
        """0 = done, 2 = bad usage or data, 3 = interrupted or failed."""
        options = self.parse_args(arguments)
        try:
            work(options)
        except KeyboardInterrupt:
            return self._refuse("interrupted", 3)
        except RwsimError as error:
            return self._refuse(error, 2 if isinstance(error, (InvalidArgument, Unavailable)) else 3)
        return 0

    def _refuse(self, error: object, status: int) -> int:
        print(f"{self.name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return status


def device_of(name: str) -> torch.device:
    """Not `resolve_device`'s auto, which is the CPU: what is measured here is the machine."""
    device = resolve_device("cuda" if name == "auto" and torch.cuda.is_available() else name)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def at_least(options: argparse.Namespace, **least: int) -> None:
    """Raise InvalidArgument for an option below its least value."""
    for name, value in least.items():
        if getattr(options, name) < value:
            raise InvalidArgument(f"--{name}", f"must be at least {value}", getattr(options, name), "leave it out for the default")


def heading(name: str, device: torch.device, arguments: Sequence[str]) -> str:
    """Command, device, versions and date."""
    meta = report.environment(device, arguments)
    return report.heading(meta | {"command": meta["command"].replace("-m benchmarks", f"-m {name}", 1)})


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Floats to six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows)
