"""Write what is generated in README.md and docs/: `python docs/readme.py` (all), or `python docs/readme.py tables`.

`python docs/readme.py derivations [T1 ...]` writes docs/derivations.md, which is not kept: `make docs` calls it.

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
# Characters of a formula that a page can show.
_LONGEST = 700
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


def derivations_page(names: list[str]) -> str:
    """Every step of the derivations, run; a formula that would fill a screen is left to the command line."""
    import derivations

    found = derivations.run(names or "all")
    if failed := [result.failure for result in found if not result.ok]:
        raise ValueError("\n".join(failed))
    intro = (
        "# Derivations\n\nEvery result, each step as it was carried out and checked when these pages were built. "
        "`rwsim derive T5` prints one, `rwsim derive lion` all that is about one rule. [Theory](theory.md) tells the story.\n\n"
    )

    def shortened(formula: re.Match[str]) -> str:
        return formula[0] if len(formula[1]) <= _LONGEST else f"*A formula of {len(formula[1]):,} characters: see the command line.*"

    return intro + re.sub(r"\$\$\n(.*?)\n\$\$", shortened, derivations.render(found, "markdown"), flags=re.DOTALL)


def main() -> None:
    if sys.argv[1:2] == ["derivations"]:
        (TOP / "docs" / "derivations.md").write_text(derivations_page(sys.argv[2:]))
        return
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
