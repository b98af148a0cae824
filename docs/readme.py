"""Write what is generated in README.md and docs/: `python docs/readme.py` (all), or `python docs/readme.py tables`.

Tables of formulas and equations come from `derivations.tables`; the table and figure of the main job from running it (a minute).
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from derivations import tables

TOP = Path(__file__).parent.parent
FORMULAS: dict[Path, dict[str, Callable[[], str]]] = {
    TOP / "README.md": {"table 1": tables.table_1, "table 6": tables.table_6},
    TOP / "docs" / "formulas.md": {"exact forms": tables.exact_forms},
    TOP / "docs" / "theory.md": {"table 1": tables.table_1, "table 6": tables.table_6},
}
# A step of a derivation, on any page above: `<!-- T2 adamw: its solution -->`.
_STEP = re.compile(r"<!-- (T\d+) (.+?) -->")


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers `<!-- name -->` and `<!-- end -->`."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- end -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"no markers for {name!r}")
    return re.sub(pattern, lambda m: m[1] + content + m[2], text, flags=re.DOTALL)


def with_formulas(path: Path) -> str:
    """The page with its generated tables brought up to date."""
    text = path.read_text()
    for name, make in FORMULAS[path].items():
        text = fill(text, name, make())
    for derivation, step in _STEP.findall(text):
        text = fill(text, f"{derivation} {step}", tables.equation(derivation, step))
    return text


def main() -> None:
    for path in FORMULAS:
        path.write_text(with_formulas(path))
    if "tables" not in sys.argv[1:]:
        import rwsim
        from rwsim.plots import save_validation
        from rwsim.tables import markdown

        result = rwsim.validate()
        readme = TOP / "README.md"
        readme.write_text(fill(readme.read_text(), "validation", markdown(result)))
        save_validation(result, TOP / "docs")
        print(f"{result.seconds:.0f} s, {'all agree' if result.passed else 'NOT all agree'}")


if __name__ == "__main__":
    main()
