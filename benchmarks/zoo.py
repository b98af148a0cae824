"""Audit the optimizers that people use: ``python -m benchmarks.zoo [--out docs/zoo.md]``.

Every SGDM-, AdamW-, Adam-, Lion-, SGDW- or sign-like class of the libraries in the extra ``zoo``, each held against the law
that its name claims. A library that is not installed is left out, and named.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata, util
from pathlib import Path
from typing import Any

import rwsim
from rwsim.audit import Report
from rwsim.audit.finding import NOTE
from rwsim.errors import InvalidArgument


@dataclass(frozen=True)
class Entry:
    """A class, the law that its name claims, and keywords that its claim needs."""

    name: str
    law: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{self.name}({given})" if given else self.name


# Distribution -> its classes.
ZOO: Mapping[str, tuple[Entry, ...]] = {
    "torch": (
        Entry("torch.optim:SGD", "sgdm"), Entry("torch.optim:SGD", "nesterov", {"nesterov": True}), Entry("torch.optim:SGD", "dampened"),
        Entry("torch.optim:Adam", "adam_l2"), Entry("torch.optim:AdamW", "adamw"),
        Entry("torch.optim:NAdam", "nadamw", {"decoupled_weight_decay": True}),
    ),
    "torch-optimi": (
        Entry("optimi:SGD", "sgdm"), Entry("optimi:SGD", "sgdw", {"decouple_wd": True}), Entry("optimi:Adam", "adam_l2"),
        Entry("optimi:AdamW", "adamw"), Entry("optimi:AdamW", "adamw_independent", {"decouple_lr": True}), Entry("optimi:Lion", "lion"),
    ),
    "pytorch_optimizer": (
        Entry("pytorch_optimizer:SGD", "sgdm"), Entry("pytorch_optimizer:SGDW", "sgdw"), Entry("pytorch_optimizer:SignSGD", "signum"),
        Entry("pytorch_optimizer:Adam", "adam_l2"), Entry("pytorch_optimizer:AdamW", "adamw"), Entry("pytorch_optimizer:Lion", "lion"),
        Entry("pytorch_optimizer:AdEMAMix", "ademamix", {"weight_decouple": True}),
    ),
    "lion-pytorch": (Entry("lion_pytorch:Lion", "lion"),),
    "heavyball": (Entry("heavyball:AdamW", "adamw"), Entry("heavyball:SGD", "sgdm"), Entry("heavyball:NAdam", "nadamw")),
    "torch-optimizer": (Entry("torch_optimizer:SGDW", "sgdw"), Entry("torch_optimizer:QHM", "qhm")),
    "bitsandbytes": (
        Entry("bitsandbytes.optim:SGD", "sgdm"), Entry("bitsandbytes.optim:Adam", "adam_l2"),
        Entry("bitsandbytes.optim:AdamW", "adamw"), Entry("bitsandbytes.optim:Lion", "lion"),
    ),
    "torchao": (Entry("torchao.optim:_AdamW", "adamw"), Entry("torchao.optim:AdamW8bit", "adamw")),
}  # fmt: skip


def installed(distribution: str) -> str | None:
    """The version of a library, or None."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    return version if util.find_spec(ZOO[distribution][0].name.partition(":")[0].partition(".")[0]) else None


def row(entry: Entry, version: str, report: Report) -> str:
    """A line of the table."""
    said = [finding for finding in report.findings if finding.kind != NOTE]
    notes = ", ".join(dict.fromkeys(finding.code for finding in report.findings if finding.kind == NOTE))
    verdict = "passes" if report.passed else "departs" if report.finished else "unfinished"
    # The first sentence is the finding; what follows are its numbers.
    words = " ".join(f"{finding.kind}: {finding.text.partition('. ')[0].rstrip('.')}." for finding in said).replace("|", "\\|")
    # Another rule of the registry, if that is what it is.
    name = report.identity.partition(":")[0]
    verdict += f": {name}" if name.endswith(f", not {entry.law}") else ""
    return f"| `{entry}` | {version} | {entry.law} | {verdict} | {words or '-'} | {notes or '-'} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this file too, between its markers")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    lines = ["| class | version | law | verdict | faults and conventions | notes |", "|---|---|---|---|---|---|"]
    missing = []
    for distribution, entries in ZOO.items():
        version = installed(distribution)
        if version is None:
            missing.append(distribution)
            continue
        for entry in entries:
            if options.only and not any(part in str(entry) for part in options.only):
                continue
            print(f"{entry} as {entry.law}", file=sys.stderr, flush=True)
            try:
                report = rwsim.audit(entry.name, entry.law, settings=entry.settings, seed=options.seed)
                lines.append(row(entry, version, report))
            except InvalidArgument as error:
                lines.append(f"| `{entry}` | {version} | {entry.law} | refused | {error} | - |")
    lines.append("")
    lines.append(f"Audited {date.today().isoformat()} with rwsim {rwsim.__version__}, seed {options.seed}." + _absent(missing))
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        before, _, rest = options.out.read_text().partition("<!-- zoo -->\n")
        after = rest.partition("<!-- end -->")[2]
        options.out.write_text(f"{before}<!-- zoo -->\n{text}\n<!-- end -->{after}")
    return 0


def _absent(missing: list[str]) -> str:
    return f" Not installed: {', '.join(missing)}." if missing else ""


if __name__ == "__main__":
    sys.exit(main())
