"""What an exported file consists of: header, verification record, and the bundled source of a rotational optimizer."""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rwsim.errors import InvalidArgument, UnsupportedRule
from rwsim.export.bundle import bundle
from rwsim.optimizers import RULES, UpdateRule, find_rule
from rwsim.rotational import RotationalAdam, RotationalAdamW, RotationalLion, RotationalOptimizer, RotationalSGDM, rotational_of
from rwsim.rotational.rate import norm_source, rotation_source
from rwsim.theory.rotation import FORMS

# Rules that have a class of their own; what else each of them can be asked for.
_CLASSES: tuple[type[RotationalOptimizer], ...] = (RotationalSGDM, RotationalAdamW, RotationalAdam, RotationalLion)
_ALSO: Mapping[str, tuple[str, ...]] = {"sgdm": ("nesterov",)}
_NO_HASH = "0" * 64
# In the place of `rwsim.rotational.paths`.
_NO_PATHS = '''
def check_paths(optimizer, group):
    """This file has the plain path alone."""
    for name in ("fused", "foreach"):
        if group.get(name):
            raise ValueError(f"{type(optimizer).__name__} has no {name} path: rwsim.rotational has it")


def step_fast(optimizer, place, group, params, angle):
    """This file has the plain path alone."""
    return params


def state_changes(optimizer):
    """Nothing is kept beside the state."""


def takes_scale(optimizer):
    """Gradients are unscaled, and overflows found, before a step."""
    return False
'''
# In the place of `rwsim.rotational.place`: a file has no code for parameters that are sharded over processes.
_PLACE = '''
from rwsim.errors import InvalidArgument


def shards_of(param, shape, dims):
    """None: a parameter is whole."""
    if hasattr(param, "device_mesh"):
        raise InvalidArgument("params", "must be whole on every process", type(param).__name__, "rwsim's own optimizers take DTensors")


def fitted(value, param, shape, dims):
    """A state tensor as it is."""
    return value
'''

_REPLACED = {"rwsim.rotational.paths": _NO_PATHS, "rwsim.rotational.place": _PLACE}

LICENSE = """MIT License

Copyright (c) 2026 the rwsim maintainers

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""


@dataclass(frozen=True)
class Subject:
    """What is exported.

    Attributes:
        rule: The rule of the inner optimizer.
        rotation: Name of the rule whose rate it turns at; its own, but for a rule that has none.
        form: ``"paper"`` or ``"exact"``.
        made: The rotational optimizer of this package.
        file: The file that the rule comes from, where that is not rwsim.
    """

    rule: type[UpdateRule]
    rotation: str
    form: str
    made: type[RotationalOptimizer]
    file: Path | None = None

    @property
    def rated(self) -> type[UpdateRule]:
        """The rule whose rate it is."""
        return self.rule if self.rotation == self.rule.name else find_rule(self.rotation)

    @property
    def name(self) -> str:
        """Of the class in the file."""
        return self.made.__name__


def subject(rule: str | type[UpdateRule], form: str, rotation: str | None) -> Subject:
    """Find out what is to be exported.

    Raises:
        InvalidArgument: No such rule or form, or a rotation that depends on the gradients.
    """
    found = find_rule(rule)
    if form not in FORMS:
        raise InvalidArgument("rate", f"must be one of {', '.join(FORMS)}", form)
    namesake = RULES.get(found.name, found)
    if set(namesake.hyper) != set(found.hyper):
        rule_text = f"bears the name of {found.name}, which takes {', '.join(namesake.hyper)}"
        raise InvalidArgument("rule", rule_text, ", ".join(found.hyper), "give it a name of its own")
    own = next((made for made in _CLASSES if made.rule is found), None)
    file = None
    if found not in RULES.values():
        file = Path(str(rule).rpartition(":")[0]) if isinstance(rule, str) else Path(str(sys.modules[found.__module__].__file__))
    chosen = Subject(found, rotation or found.name, form, own or rotational_of(found), file)
    if rotation is not None and find_rule(rotation) not in RULES.values():
        raise InvalidArgument("rotation", f"must be one of {', '.join(RULES)}", rotation)
    try:
        rotation_source(chosen.rated, form)
    except UnsupportedRule as error:
        remedy = "take the rate of another rule with --rotation, such as adamw" if "depends" in error.missing else ""
        if form == "exact" and not remedy:
            remedy = "take --rate paper"
        raise InvalidArgument("rule", f"has no rate that a file could carry: {error.missing}", found.name, remedy) from None
    return chosen


def body(chosen: Subject) -> str:
    """All of the file below its header."""
    rates = _rates(chosen)
    if chosen.made in _CLASSES:
        return bundle({}, [(chosen.made.__module__, chosen.name)], {"rwsim.rotational.lookup": rates, **_REPLACED})
    where, sources = chosen.rule.__module__, {}
    if chosen.file is not None:
        where = chosen.file.name
        sources[where] = chosen.file.read_text()
    wanted = [(where, chosen.rule.__name__), ("rwsim.rotational.of_rule", "RuleOptimizer")]
    text = bundle(sources, wanted, {"rwsim.rotational.lookup": rates, **_REPLACED})
    lines = [
        f"class {chosen.name}(RuleOptimizer):",
        f'    """The rotational {chosen.rule.name}."""',
        "",
        f"    rule = {chosen.rule.__name__}",
    ]
    return "\n".join([text, "", *lines, ""])


def _rates(chosen: Subject) -> str:
    """Source of the module in the place of `rwsim.rotational.lookup`: rates that are written out."""
    rules = dict.fromkeys([chosen.rated, chosen.rule, *(RULES[name] for name in _ALSO.get(chosen.rule.name, ()))])
    lines = ["from math import pi", "from rwsim.errors import InvalidArgument", "from rwsim.rotational.rotate import asin, sqrt", ""]
    tables: dict[str, list[str]] = {"ROTATIONS": [], "NORMS": []}
    for rule in rules:
        for form in FORMS:
            for table, source in (("ROTATIONS", rotation_source), ("NORMS", norm_source)):
                try:
                    text = source(rule, form)
                except UnsupportedRule:
                    continue
                kind = "rotation" if table == "ROTATIONS" else "norm"
                name = f"{_identifier(rule.name)}_{form}_{kind}"
                lines.append(re.sub(r"^def \w+", f"def {name}", text) + "\n")
                tables[table].append(f'    ("{rule.name}", "{form}"): {name},')
    for table, entries in tables.items():
        lines.append("\n".join([f"{table} = {{", *entries, "}", ""]))
    for function, table, option in (("rate_of", "ROTATIONS", "rotation"), ("norm_rate_of", "NORMS", "norm")):
        lines.append(f'''
def {function}(rule, form):
    """The function of a group that this file carries for a rule, or for a rule's name."""
    key = (rule if isinstance(rule, str) else rule.name, form)
    if key not in {table}:
        known = ", ".join(" ".join(one) for one in {table}) or "none"
        raise InvalidArgument("{option}", f"must be one that this file carries (rule and rate: {{known}})", " ".join(key))
    return {table}[key]
''')
    return "\n".join(lines)


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def compose(chosen: Subject, text: str, record: Mapping[str, Any]) -> str:
    """Header, record and body; the record's hash is of the whole file with that hash at zero."""
    values = json.dumps({**record, "sha256": _NO_HASH}, indent=4, ensure_ascii=True)
    # JSON's words are not Python's.
    values = re.sub(r": (true|false|null)\b", lambda m: {"true": ": True", "false": ": False", "null": ": None"}[m.group(1)], values)
    shown = _shown(chosen)
    checks = "\n".join(f"- {check['name']}: {check['text']}" for check in record["checks"])
    head = f'''"""{chosen.name}: {chosen.rule.name} as a rotational optimizer.

Algorithm 1 of Kosson, Messmer, Jaggi, "Rotational Equilibrium", ICML 2024 (arXiv:2305.17212).
This file needs torch alone. `rwsim export` wrote it after verifying:

{checks}

Use:

{shown}

`rwsim verify FILE` hashes it again and repeats the checks.

{LICENSE}"""
# SPDX-License-Identifier: MIT

'''
    said = "# What was verified, when, and with what. The hash is of this file with the hash itself at zero."
    whole = "\n".join([head + text, "", said, f"VERIFICATION = {values}", ""])
    return whole.replace(_NO_HASH, digest(whole))


def _shown(chosen: Subject) -> str:
    values = ["model.parameters()", "lr=...", "weight_decay=..."]
    if chosen.rotation != chosen.rule.name:
        values.append(f"rotation={chosen.rotation!r}")
    if chosen.form != "paper":
        values.append(f"rate={chosen.form!r}")
    return f"    optimizer = {chosen.name}({', '.join(values)})"


def digest(text: str) -> str:
    """SHA-256 of an exported file, its own hash at zero."""
    return hashlib.sha256(re.sub(r'"sha256": "[0-9a-f]{64}"', f'"sha256": "{_NO_HASH}"', text).encode()).hexdigest()


def record_of(text: str, path: Path) -> dict[str, Any]:
    """The verification record of an exported file, without running it.

    Raises:
        InvalidArgument: It has none.
    """
    try:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "VERIFICATION":
                record = ast.literal_eval(node.value)
                if isinstance(record, dict) and {"rule", "class", "rate", "sha256", "hyper", "seed"} <= record.keys():
                    return record
    except (SyntaxError, ValueError):
        pass
    raise InvalidArgument("file", "must be one that rwsim export wrote", str(path), "it has no verification record that can be read")
