"""Formulas as MathML, which browsers set themselves: pages ask for no script and no font, and are read without a network."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(translator: HTML5Translator, node: nodes.math_block) -> None:
    # A region that is scrolled by hand and keyboard: some equations are wider than a phone.
    translator.body.append('<div class="formula" tabindex="0" role="region" aria-label="Formula">')
    translator.body.append(convert(node.astext(), display="block"))
    translator.body.append("</div>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
