"""What stands in single backticks in a docstring: a link where it is a full name of rwsim's, else plain code."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole


def name(role: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None, content: Any = ()) -> tuple[list, list]:
    if text.startswith("rwsim."):
        return PyXRefRole()("py:obj", rawtext, text, lineno, inliner, options or {}, content)
    return [nodes.literal(rawtext, text)], []


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("name", name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
