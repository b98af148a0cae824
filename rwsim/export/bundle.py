"""One file out of several modules: the definitions that a class needs, in the order in which they need each other."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rwsim.errors import InvalidArgument

_PACKAGE = "rwsim"
# An example in a docstring imports from rwsim; it is the last section.
_EXAMPLE = re.compile(r'\n\n[ ]+Example:\n(?:.*\n)*?([ ]*""")')


@dataclass
class _Module:
    """A module's definitions: name -> text, what each uses, and where its names come from."""

    source: str
    order: list[str] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)  # set or changed in statements that are not carried over
    own: dict[str, tuple[str, str]] = field(default_factory=dict)  # imported from rwsim: name -> (module, name there)
    others: dict[str, str] = field(default_factory=dict)  # imported from elsewhere: name -> statement


def _parsed(source: str) -> _Module:
    module, lines = _Module(source), source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            module.own |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
                statement = f"import {shown}" if isinstance(node, ast.Import) else f"from {node.module} import {shown}"
                module.others[(alias.asname or alias.name).partition(".")[0]] = statement
            continue
        names = _names(node)
        if not names:
            stored = (leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name | ast.Attribute | ast.Subscript))
            module.unclear |= {_base(leaf) for leaf in stored if isinstance(leaf.ctx, ast.Store)}
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        text = "\n".join(lines[first : node.end_lineno])
        used = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
        for name in names:
            if name not in module.text:
                module.order.append(name)
            module.text[name], module.uses[name] = text, used - {name}
    return module


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets: Sequence[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    plain = all(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in targets)
    return [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)] if plain else []


def _base(node: ast.expr) -> str:
    """The name that is set, or whose part is."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def bundle(sources: Mapping[str, str], wanted: Sequence[tuple[str, str]], replaced: Mapping[str, str]) -> str:
    """The text of some definitions and of all that they need of rwsim; it imports nothing of rwsim.

    Args:
        sources: Module name -> text, for modules that are not importable under that name.
        wanted: (module, name) of what is asked for.
        replaced: Module name -> text to take in its place.

    Raises:
        InvalidArgument: Two definitions of one name, or one that is not there.
    """
    modules: dict[str, _Module] = {}
    needed: dict[str, set[str]] = {}

    def module_of(where: str) -> _Module:
        if where not in modules:
            text = replaced.get(where) or sources.get(where) or inspect.getsource(importlib.import_module(where))
            modules[where] = _parsed(text)
        return modules[where]

    def home(where: str, name: str) -> tuple[str, str]:
        """Where a name is defined, past the modules that only pass it on."""
        while name not in module_of(where).text and name in module_of(where).own:
            where, name = module_of(where).own[name]
        return where, name

    def users(where: str, name: str) -> list[tuple[str, str]]:
        """What a definition uses of rwsim."""
        module = module_of(where)
        known = module.own.keys() | module.text.keys() | module.unclear
        return [home(where, used) for used in sorted(module.uses[name] & known)]

    def visit(where: str, name: str) -> None:
        if name in needed.setdefault(where, set()):
            return
        if name in module_of(where).unclear:
            rule = f"needs {name}, which {where} sets or changes in a statement that cannot be carried over"
            raise InvalidArgument("rule", rule, name, "give it its value in one plain assignment")
        if name not in module_of(where).text:
            raise InvalidArgument("rule", f"needs {name}, which {where} does not define", name, "define it in the rule's own file")
        needed[where].add(name)
        for used in users(where, name):
            visit(*used)

    for one in wanted:
        visit(*home(*one))
    # What a module uses comes before it.
    order: list[str] = []

    def place(where: str) -> None:
        if where in order:
            return
        for name in sorted(needed[where]):
            for other, _ in users(where, name):
                if other != where:
                    place(other)
        order.append(where)

    for where in [home(*one)[0] for one in wanted]:
        place(where)
    holders: dict[str, str] = {}
    imports: set[str] = set()
    parts = []
    for where in order:
        module = module_of(where)
        texts: list[str] = []
        for name in module.order:
            if name not in needed[where]:
                continue
            if holders.setdefault(name, where) != where:
                raise InvalidArgument("rule", f"must not define {name}, which {holders[name]} defines too", name, "rename it")
            imports |= {module.others[used] for used in module.uses[name] if used in module.others}
            if module.text[name] not in texts:
                texts.append(module.text[name])
        said = f"# From {where}." if where.startswith(_PACKAGE) else f"# From {where}, the rule's own file."
        texts = [_EXAMPLE.sub(r"\n\1", text) for text in texts]
        parts.append("\n".join([said, *("\n\n" + text if "\n" in text else text for text in texts)]))
    plain = sorted(line for line in imports if line.startswith("import "))
    return "\n".join([*plain, *_merged(line for line in imports if line.startswith("from "))]) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def _merged(lines: Iterable[str]) -> list[str]:
    """Imports from one module in one line."""
    names: dict[str, list[str]] = {}
    for line in sorted(lines):
        module, _, name = line.removeprefix("from ").partition(" import ")
        names.setdefault(module, []).append(name)
    return [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
