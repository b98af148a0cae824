"""What the pages of rwsim share: `rwsim report` and `rwsim explore` are made of it. Pure text in, HTML out; needs nothing but Python.

The interface:

`html`
    `Html`: text that is HTML already. `tag(name, *children, **attributes)` makes an element and escapes whatever is not `Html`;
    `escape(value)`, `join(*parts)`. `data(ident, value)`: JSON that a script of the page reads
    (``JSON.parse(document.getElementById(ident).textContent)``).
`document`
    `page(title, body, *, lead="", script="", style="", footer="", connect=False) -> str`: one whole HTML document that makes no
    request. It has the shared style, header (h1: the title), main (`body`), footer, and a Content-Security-Policy that runs `script`
    and nothing else: no inline event handler, no style attribute (a script may set `element.style`). `connect=True` lets it talk
    to the server that it came from.
`chart`
    `chart(ident, title, series, x, y, ...) -> Html`: a figure with an SVG of lines and points (`Series`), axes (`Axis`), legend, title and
    description. `heatmap(ident, ...)`: a grid of numbers as colours.
`scale`
    Conventions for whoever draws by script: `ticks`, `tick_texts`, `number`, `percent`.
`table`
    `table(ident, caption, columns, rows) -> Html`: a table with caption and scopes in a region of its own that scrolls; with `SORT`
    among the page's scripts it sorts by its headers (click, Enter or Space). `Column`, `Cell`.

Colours are CSS variables of style.css, light and dark: ``--ground`` (background), ``--ink``, ``--soft`` (secondary
text), ``--rule`` (lines), ``--panel``, ``--link``, ``--good``, ``--bad``, ``--unsure``; of series ``--measured``, ``--full``, ``--exact``,
``--paper``, ``--path`` and ``--c1`` to ``--c6``. A series is drawn by class: ``class="line exact"`` in an SVG of class ``plot`` has the
colour and dash of the exact form, ``class="dot measured"`` the points of what was measured.
"""
