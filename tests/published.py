"""The published JSON schemas hold the commands: what one writes with --json is what its schema says, nothing more and nothing less."""

import json
from pathlib import Path
from typing import Any

from rwsim.schemas import DOCUMENTS


def held(command: str, written: Path | dict[str, Any]) -> Any:
    """What a command wrote, if it is as published; null and absent are not the same."""
    document = json.loads(written.read_text(encoding="utf-8") if isinstance(written, Path) else json.dumps(written))
    model = DOCUMENTS[command].model_validate_json(json.dumps(document), strict=True)
    assert model.model_dump(mode="json", by_alias=True) == document
    return document
