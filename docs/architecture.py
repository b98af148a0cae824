"""Write docs/architecture.svg, the house in one picture: `python -m docs.architecture`.

Rows and columns are the layers that `tests/test_layout.py` holds to their order; a dot is an import that the code has.
"""

import ast
from pathlib import Path
from xml.sax.saxutils import escape

from tests.test_layout import LAYERS, MODULES, imported, layer

TOP = Path(__file__).parent.parent
PICTURE = TOP / "docs" / "architecture.svg"
# Sizes in pixels.
_ROW, _NAME, _TEXT, _CELL, _MARGIN, _TOP = 26, 110, 560, 22, 14, 100
_LONGEST = 80  # characters of a description


def description(name: str) -> str:
    """The first sentence of a layer's docstring."""
    package = TOP / "rwsim" / name / "__init__.py"
    path = package if package.exists() else TOP / "rwsim" / f"{name}.py"
    lines = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ").replace("`", "")
    first = lines.split(". ")[0].rstrip(".")
    return first if len(first) <= _LONGEST else first[: _LONGEST - 1].rsplit(" ", 1)[0] + "…"


def uses() -> set[tuple[str, str]]:
    """(importer, imported) of two layers."""
    found = set()
    for path in MODULES:
        for name in imported(path):
            if name.startswith("rwsim.") and layer(path) != "__init__" and name.split(".")[1] != layer(path):
                found.add((layer(path), name.split(".")[1]))
    return found


def svg() -> str:
    left = _MARGIN + _NAME + _TEXT
    width, height = left + _CELL * len(LAYERS) + 3 * _MARGIN, _TOP + _ROW * len(LAYERS) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-size="13" '
        'font-family="system-ui, sans-serif" role="img" aria-labelledby="title">',
        '<title id="title">The layers of rwsim, what each is, and which of the others it imports</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    used = uses()
    for row, name in enumerate(LAYERS):
        y = _TOP + _ROW * row
        if row % 2 == 0:
            parts.append(f'<rect x="{_MARGIN / 2}" y="{y}" width="{width - _MARGIN}" height="{_ROW}" fill="#f2f5f8"/>')
        parts.append(f'<text x="{_MARGIN}" y="{y + 18}" font-weight="600" fill="#0b3d63">{name}</text>')
        parts.append(f'<text x="{_MARGIN + _NAME}" y="{y + 18}" fill="#333">{escape(description(name))}</text>')
        x = left + _CELL * row + _CELL / 2
        parts.append(f'<text transform="translate({x + 4} {_TOP - 8}) rotate(-60)" font-size="12" fill="#0b3d63">{name}</text>')
        parts.append(f'<rect x="{x - 6}" y="{y + 7}" width="12" height="12" rx="2" fill="#c9d3dc"/>')
        for column, other in enumerate(LAYERS[:row]):
            if (name, other) in used:
                parts.append(f'<circle cx="{left + _CELL * column + _CELL / 2}" cy="{y + 13}" r="5" fill="#0072b2"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg())
