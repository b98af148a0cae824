"""What the pages are made of: every public name is in the reference, the picture is that of the code, links that lead nowhere are seen."""

import ast
import re
from pathlib import Path

import pytest
import sympy as sp

import rwsim
from docs import architecture, links
from rwsim.theory import paper
from rwsim.theory import symbols as sym

DOCS = Path(rwsim.__file__).parent.parent / "docs"
PACKAGES = ("rwsim", *(f"rwsim.{name}" for name in ("audit", "experiments", "optimizers", "plots", "probe", "rotational")), "derivations")
REFERENCE = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))


def public(package: str) -> set[str]:
    """`__all__`, read rather than imported: that takes seconds."""
    tree = ast.parse((DOCS.parent / package.replace(".", "/") / "__init__.py").read_text())
    (found,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return set(ast.literal_eval(found))


def documented() -> set[str]:
    """The last part of every name that the reference has an entry for."""
    return {name.rpartition(".")[2] for name in re.findall(r"^\.\. (?:auto|py:)\w+:: (\S+)", REFERENCE, re.MULTILINE)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    assert not public(package) - documented()


def test_every_rule_and_error_is_in_the_reference():
    assert not {rule.__name__ for rule in rwsim.RULES.values()} - documented()
    assert ".. automodule:: rwsim.errors" in REFERENCE


def test_every_page_is_in_the_contents():
    """Sphinx warns of one that is not; so does this, without sphinx."""
    index = (DOCS / "index.md").read_text()
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert not {page for page in pages if not re.search(rf"^{page}$", index, re.MULTILINE)}
    assert all(f"../notebooks/{path.stem}\n" in index for path in (DOCS.parent / "notebooks").glob("*.md"))


def test_the_picture_is_that_of_the_code():
    """After a change of who imports whom: `python -m docs.architecture`."""
    assert architecture.PICTURE.read_text() == architecture.svg()


def test_links_that_lead_nowhere_are_named(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"></a><a href="b.html#there"></a><a href="https://example.org/x"></a>'
        '<a href="b.html#nowhere"></a><a href="c.html"></a><img src="d.png">'
    )
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><a href="a.html">up</a>')
    assert links.broken(tmp_path) == ["a.html: b.html#nowhere", "a.html: c.html", "a.html: d.png"]


# Formulas within a sentence of a page, and what theory has in their place.
_ADAMW, _SMALL = paper.TABLE_1["adamw"], sp.Symbol("x", positive=True)
INLINE = {
    ("docs/theory.md", r"$\eta C / 2\lambda$"): (sym.eta * sym.C / (2 * sym.lam), _ADAMW.norm**2),
    ("notebooks/verify-a-formula.md", r"$\sqrt{\eta C / 2\lambda}$"): (sp.sqrt(sym.eta * sym.C / (2 * sym.lam)), _ADAMW.norm),
    ("notebooks/your-own-rule.md", r"$\sqrt{\eta C/2\lambda}$"): (sp.sqrt(sym.eta * sym.C / (2 * sym.lam)), _ADAMW.norm),
    ("notebooks/your-own-rule.md", r"$\sqrt{(1-\beta_1)/(1+\beta_1)}"): (
        sp.sqrt((1 - sym.beta1) / (1 + sym.beta1)), _ADAMW.rms_update / (sym.eta * sp.sqrt(sym.C)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", INLINE, ids=lambda place: f"{Path(place[0]).stem} {place[1]}")
def test_formulas_in_sentences_are_those_of_theory(place):
    page, written = place
    assert written in " ".join((DOCS.parent / page).read_text().split())
    ours, theirs = INLINE[place]
    assert sp.simplify(ours / theirs) == 1
