"""The audit against mutants of every rule: each small change of a room's formula must be seen by the scenes of P1 to P5.

The mutants are made from the room's syntax tree, none by hand: operators swapped, one side of an operation dropped, a number
one larger, a function left out. Those that survive are named with the reason why they are the same optimizer.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from rwsim.audit.context import Context
from rwsim.audit.identify import Observed, rule_paths
from rwsim.audit.probes import PROBES
from rwsim.audit.script import Maker, Script
from rwsim.audit.subject import Subject, SubjectError
from rwsim.errors import InvalidArgument
from rwsim.optimizers import RULES, UpdateRule
from tests.faulty import optimizer_of

_SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
# The sign forgets a positive factor: that of Signum's gradient says nothing.
_FACTOR = "a positive factor of the averaged gradient, which the sign forgets"
EQUIVALENT = {
    ("signum", "(1 - hyper.momentum) * grad -> grad"): _FACTOR,
    ("signum", "1 - hyper.momentum -> 1 + hyper.momentum"): _FACTOR,
    ("signum", "1 - hyper.momentum -> 1"): _FACTOR,
    ("signum", "1 - hyper.momentum -> hyper.momentum"): _FACTOR,
    ("signum", "1 -> 2"): _FACTOR,
}


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        if type(node.op) in _SWAPPED:
            yield ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
            yield node.right
        yield node.left
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        yield node.args[0]


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


@cache
def mutants(name: str) -> list[tuple[str, type[UpdateRule]]]:
    """Every mutant of a rule's `update`: what was changed, and the class."""
    room = RULES[name]
    found = []
    original = ast.parse(textwrap.dedent(inspect.getsource(room)))
    count = len([node for node in ast.walk(original) if isinstance(node, ast.expr)])
    for i in range(count):
        tree = copy.deepcopy(original)
        update = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        within = {id(node) for node in ast.walk(update)}
        node = [node for node in ast.walk(tree) if isinstance(node, ast.expr)][i]
        if id(node) not in within:
            continue
        for j in range(len(list(_changes(node)))):
            mutated = copy.deepcopy(tree)
            old = [each for each in ast.walk(mutated) if isinstance(each, ast.expr)][i]
            new = list(_changes(old))[j]
            what = f"{ast.unparse(old)} -> {ast.unparse(new)}"
            names = {"UpdateRule": UpdateRule}
            exec(ast.unparse(_Replace(old, new).visit(mutated)), names)
            found.append((what, names[room.__name__]))
    return found


@cache
def _scenes(name: str) -> list[Script]:
    context = Context(Subject(optimizer_of(RULES[name]), name), RULES[name], 0)
    generator = torch.Generator().manual_seed(0)
    rooms = {probe: room for probe, room in PROBES.items() if hasattr(room, "scenes")}
    return [scene for probe, room in rooms.items() for scene in room.scenes(Maker(probe, context.words, context.pinned, generator))]


def caught(name: str, mutant: type[UpdateRule]) -> bool:
    """Whether a scene ends elsewhere than under the law of that name, or the mutant breaks."""
    subject = Subject(optimizer_of(mutant), "mutant")
    for scene in _scenes(name):
        try:
            path = scene.subject(subject, torch.float64)
        except (SubjectError, InvalidArgument):
            return True
        observed = Observed.of([scene], [path], torch.float64)
        if observed.errors(rule_paths(RULES[name], [scene], {}))[0] > 1:
            return True
    return False


def _survivors(name: str, chosen: list[tuple[str, type[UpdateRule]]]) -> list[str]:
    return [what for what, mutant in chosen if (name, what) not in EQUIVALENT and not caught(name, mutant)]


@pytest.mark.parametrize("name", RULES)
def test_catches_every_third_mutant(name):
    chosen = mutants(name)[::3]
    assert len(chosen) >= 4
    assert not _survivors(name, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_catches_every_mutant(name):
    assert not _survivors(name, mutants(name))


def test_there_are_enough_mutants_and_the_equivalent_ones_are_few_and_survive():
    every = {(name, what): mutant for name in RULES for what, mutant in mutants(name)}
    assert len(every) >= 400
    assert set(EQUIVALENT) <= set(every)
    assert len(EQUIVALENT) <= 0.02 * len(every)
    assert not any(caught(name, every[name, what]) for name, what in EQUIVALENT)


def test_a_room_unchanged_is_not_caught():
    assert not any(caught(name, RULES[name]) for name in RULES)
