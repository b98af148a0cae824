"""Results as text, LaTeX (a document that pdflatex takes; the formulas alone suit MathJax) or Markdown with $$."""

from collections.abc import Sequence

import sympy as sp
from sympy.printing.pretty.pretty import PrettyPrinter
from sympy.printing.pretty.stringpict import prettyForm, stringPict

from derivations.core import Result, Step

FORMATS = ("text", "latex", "markdown")
_TEX = {"=": "=", "~": r"\sim", "!=": r"\neq", ">": ">", "≈": r"\approx"}
_PREAMBLE = "\\documentclass{article}\n\\usepackage{amsmath,amssymb}\n\\begin{document}\n"


def tex(step: Step) -> str:
    """The line of a step in LaTeX."""
    relation = _TEX[step.relation]
    if step.relation == "~":
        goal = r"\infty" if step.towards is sp.oo else "0"
        relation = rf"\underset{{{sp.latex(step.small)} \to {goal}}}{{\sim}}"
    if step.wrong:
        relation = rf"\;\overset{{?}}{{{relation}}}\;"
    return f"{sp.latex(step.lhs)} {relation} {sp.latex(step.rhs)}"


def _pretty(step: Step) -> str:
    relation = step.relation + (f" [{step.small} -> {step.towards}]" if step.relation == "~" else "") + (" ?" if step.wrong else "")
    left, right = (PrettyPrinter({"wrap_line": False})._print(side) for side in (step.lhs, step.rhs))
    return str(prettyForm(*stringPict.next(left, f" {relation} ", right)))


def _escape(text: str) -> str:
    for plain, tex in (("\\", r"\textbackslash "), ("_", r"\_"), ("^", r"\^{}"), ("%", r"\%"), ("&", r"\&"), ("#", r"\#"), ("~", r"\~{}")):
        text = text.replace(plain, tex)
    return text.replace("->", r"$\to$").replace("<", r"\textless{}").replace(">", r"\textgreater{}").replace("||", r"\textbar\textbar{}")


def render(results: Result | Sequence[Result], fmt: str = "text") -> str:
    """Every step with its reason and how it was checked.

    Args:
        results: One result or several. LaTeX of one is a fragment, of several a whole document.
        fmt: ``text``, ``latex`` or ``markdown``.
    """
    if fmt not in FORMATS:
        raise ValueError(f"`fmt` must be one of {', '.join(FORMATS)}, got {fmt!r}.")
    if isinstance(results, Result):
        return _RENDERERS[fmt](results)
    body = "\n".join(_RENDERERS[fmt](result) for result in results)
    return f"{_PREAMBLE}{body}\\end{{document}}\n" if fmt == "latex" else body


def _text(result: Result) -> str:
    d = result.derivation
    lines = [f"{d.id}  {d.title}   [{d.where}]", ""]
    for number, (step, how) in enumerate(result.checked, 1):
        lines += [f"  {number}. {step.name}", f"     {step.reason}", ""]
        lines += [f"       {line}".rstrip() for line in _pretty(step).splitlines()]
        lines += ["", f"     [{how}]", ""]
    return "\n".join([*lines, f"  {_verdict(result)}", ""])


def _latex(result: Result) -> str:
    d = result.derivation
    lines = [rf"\subsection*{{{_escape(d.id)}: {_escape(d.title)}}}", _escape(d.where) + "."]
    for step, how in result.checked:
        lines += [rf"\paragraph{{{_escape(step.name)}}} {_escape(step.reason)}"]
        lines += [r"\begin{equation*}", tex(step), r"\end{equation*}", rf"\textit{{Check: {_escape(how)}.}}"]
    return "\n".join([*lines, "", _escape(_verdict(result)), ""])


def _markdown(result: Result) -> str:
    d = result.derivation
    lines = [f"## {d.id}: {d.title}", "", f"*{d.where}*", ""]
    for number, (step, how) in enumerate(result.checked, 1):
        lines += [f"**{number}. {step.name}.** {step.reason}", "", "$$", tex(step), "$$", "", f"Check: {how}.", ""]
    return "\n".join([*lines, f"**{_verdict(result)}**", ""])


def _verdict(result: Result) -> str:
    return f"Holds: {len(result.checked)} steps." if result.ok else f"DOES NOT HOLD: {result.failure}"


_RENDERERS = {"text": _text, "latex": _latex, "markdown": _markdown}
