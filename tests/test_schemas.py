"""Published schemas are generated from the code, cover every command that writes --json, and refuse what is not as published."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

import rwsim
from rwsim.cli import HOLDS, USAGE, app, run
from rwsim.schemas import DOCUMENTS
from tests.published import held

ROOT = Path(rwsim.__file__).parent.parent
SAMPLES = {"validate": "validate/validation.json", "plan": "plan/plan.json", "audit": "audit/audit.json"}


def test_every_command_that_writes_json_has_a_schema():
    writes = {name for name in app if not name.startswith("-") and "--json" in str(app[name].assemble_argument_collection())}
    assert writes == set(DOCUMENTS)
    assert {path.name for path in (ROOT / "docs" / "schemas").iterdir()} == {f"{name}.schema.json" for name in DOCUMENTS}


@pytest.mark.parametrize("command", DOCUMENTS)
def test_the_published_schema_is_the_code(command, capsys):
    """`rwsim schema COMMAND > docs/schemas/COMMAND.schema.json` writes it anew."""
    assert run(["schema", command]) == HOLDS
    assert capsys.readouterr().out == (ROOT / "docs" / "schemas" / f"{command}.schema.json").read_text()


@pytest.mark.parametrize("command", DOCUMENTS)
def test_a_schema_is_one(command):
    jsonschema = pytest.importorskip("jsonschema", reason="not needed to use rwsim")
    schema = json.loads((ROOT / "docs" / "schemas" / f"{command}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    if command in SAMPLES:
        jsonschema.validate(json.loads((ROOT / "tests" / "results" / SAMPLES[command]).read_text()), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"meta": {}}, schema)


@pytest.mark.parametrize("command", SAMPLES)
def test_rejects_what_is_not_as_published(command, tmp_path):
    document = held(command, ROOT / "tests" / "results" / SAMPLES[command])
    file = tmp_path / "x.json"
    rows = next(key for key in ("records", "layers", "findings") if key in document)
    first = document[rows][0]
    changed = [
        {**document, "more": 1},
        {key: value for key, value in document.items() if key != "meta"},
        {**document, rows: [{**first, "unknown": 1}]},
        {**document, rows: [{key: value for key, value in first.items() if key != list(first)[-1]}]},
        {**document, rows: [{**first, next(iter(first)): 3}]},
    ]
    for wrong in changed:
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValidationError):
            held(command, file)


def test_an_unknown_command_is_refused(capsys):
    assert run(["schema", "report"]) == USAGE
    assert "`command` must be one of validate, derive" in capsys.readouterr().err
