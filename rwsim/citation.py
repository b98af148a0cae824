"""How to cite rwsim and the paper that it is after: the one source of CITATION.cff and of what `rwsim cite` prints."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rwsim import __version__

_TITLE = "rwsim: a random-walk laboratory for optimizers with weight decay"
_MAINTAINERS = "the rwsim maintainers"
YEAR = 2026
PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "title": "Rotational Equilibrium: How Weight Decay Balances Learning Across Neural Networks",
        "authors": (("Atli", "Kosson"), ("Bettina", "Messmer"), ("Martin", "Jaggi")),
        "venue": "Proceedings of the 41st International Conference on Machine Learning",
        "series": "Proceedings of Machine Learning Research",
        "volume": "235",
        "year": 2024,
        "arxiv": "2305.17212",
    }
)


def bibtex() -> str:
    """BibTeX entries of rwsim, at this version, and of the paper.

    Example:
        >>> print(bibtex().splitlines()[0])
        @software{rwsim,
    """
    authors = " and ".join(f"{family}, {given}" for given, family in PAPER["authors"])
    mine = {"title": f"{{{_TITLE}}}", "author": f"{{{_MAINTAINERS}}}", "version": __version__, "year": YEAR}
    paper = {
        "title": f"{{{PAPER['title']}}}", "author": authors, "booktitle": PAPER["venue"], "series": PAPER["series"],
        "volume": PAPER["volume"], "year": PAPER["year"], "eprint": PAPER["arxiv"], "archiveprefix": "arXiv",
    }  # fmt: skip
    return _entry("software", "rwsim", mine) + "\n" + _entry("inproceedings", "kosson2024rotational", paper)


def _entry(kind: str, key: str, fields: Mapping[str, object]) -> str:
    return f"@{kind}{{{key},\n" + "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items()) + "}\n"


def cff() -> str:
    """The file CITATION.cff, of the Citation File Format 1.2.0.

    Example:
        >>> print(cff().splitlines()[0])
        cff-version: 1.2.0
    """
    people = [{"family-names": family, "given-names": given} for given, family in PAPER["authors"]]
    paper = {
        "type": "conference-paper", "title": PAPER["title"], "authors": people, "year": PAPER["year"],
        "collection-title": PAPER["venue"], "volume": PAPER["volume"],
        "identifiers": [{"type": "other", "value": f"arXiv:{PAPER['arxiv']}"}],
    }  # fmt: skip
    values = {
        "message": "If you use rwsim, please cite it and the paper that it is after.", "type": "software", "title": _TITLE,
        "version": __version__, "license": "MIT", "authors": [{"name": _MAINTAINERS}],
        "keywords": ["optimizer", "weight decay", "rotational equilibrium", "random walk", "AdamW", "Lion"], "references": [paper],
    }  # fmt: skip
    return "\n".join(["cff-version: 1.2.0", *_yaml(values)]) + "\n"


def _yaml(value: Any) -> list[str]:
    """Lines of YAML: mappings and lists in blocks, scalars as JSON, which YAML reads."""
    if isinstance(value, dict):
        lines = []
        for key, one in value.items():
            inner = _yaml(one)
            lines += [f"{key}: {inner[0]}"] if not isinstance(one, dict | list) else [f"{key}:", *("  " + line for line in inner)]
        return lines
    if isinstance(value, list):
        return [("- " if not i else "  ") + line for one in value for i, line in enumerate(_yaml(one))]
    return [json.dumps(value)]
