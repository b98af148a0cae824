"""The crowd: every kind of parameter that a real model may hold, together in one optimizer, for the probe of paths."""

from collections.abc import Collection
from functools import cache, partial

import torch

from rwsim.audit.cast import REFUSALS, Actor, Layout
from rwsim.audit.finding import FAULT, NOTE, Finding, Kind
from rwsim.audit.stage import Stage
from rwsim.audit.subject import SubjectError

_STEPS = 50
_ALWAYS = range(_STEPS)
# When the paused parameter has no gradient: before its first one, between, at the end.
_PAUSES = (*range(4), *range(24, 30), *range(46, _STEPS))
_SILENT = {"parameter without gradient": _ALWAYS, "frozen parameter": _ALWAYS, "paused parameter": _PAUSES}


def _without(actor: Actor, when: Collection[int], trainable: bool = True) -> Actor:
    """The actor with its gradient None at these steps."""
    grads = [None if step in when else grad for step, grad in enumerate(actor.grads)]
    return Actor(actor.name, actor.start, grads, actor.layout, trainable)


class Crowd:
    """Everything that a real model may hold, in one optimizer; `usable` are those that the default path bears."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.full = cache(self._full)
        self.default = cache(lambda draw: stage.play(self.cast(draw)))
        self.usable = {actor.name for actor in self.full(0)}
        try:
            stage.play(self.full(0))
        except SubjectError:
            self._crash_by_crash()

    def _full(self, draw: int) -> list[Actor]:
        shapes: list[tuple[str, tuple[int, ...], Layout]] = [
            ("matrix", (3, 4), "contiguous"), ("vector", (5,), "contiguous"), ("0-d tensor", (), "contiguous"),
            ("zero-size tensor", (0, 3), "contiguous"), ("transposed view", (4, 3), "transposed"), ("strided view", (2, 3), "strided"),
            *((name, (2, 3), "contiguous") for name in _SILENT),
        ]  # fmt: skip
        cast = [self.stage.actor(name, draw, shape, _STEPS, layout=layout) for name, shape, layout in shapes]
        return [_without(a, _SILENT[a.name], a.name != "frozen parameter") if a.name in _SILENT else a for a in cast]

    def cast(self, draw: int) -> list[Actor]:
        return [actor for actor in self.full(draw) if actor.name in self.usable]

    def find(self, name: str, draw: int) -> tuple[Actor, torch.Tensor] | None:
        """An actor, and where it goes on the default path."""
        pairs = zip(self.cast(draw), self.default(draw).paths, strict=True)
        return next((pair for pair in pairs if pair[0].name == name), None)

    def _crash_by_crash(self) -> None:
        """Leave out what the default path does not bear. A class may refuse it, but it must say so when it is built."""
        plain, *others = self.full(0)
        self.stage.play([plain])  # where this breaks, the optimizer itself does
        for actor in others:
            try:
                self.stage.play([plain, actor])
            except SubjectError as error:
                self.usable.remove(actor.name)
                refused = error.doing.startswith("construction") and isinstance(error.error, (*REFUSALS, TypeError))
                if refused or isinstance(error.error, NotImplementedError):
                    self.stage.skip(actor.name, error)
                    continue
                code, snippet = f"crash-{actor.name.replace(' ', '-')}", self.stage.snippet([plain, actor], 6, "params(), grads")
                self.stage.say(code, FAULT, "medium", f"a {actor.name} beside a plain matrix: {error}", snippet=snippet)

    def together(self) -> None:
        """Each goes where it would go alone, whatever its shape and layout, and keeps its dtype."""
        for actor, dtype in zip(self.cast(0), self.default(0).dtypes, strict=True):
            if dtype != actor.start.dtype:
                self.stage.say("dtype-changed", FAULT, "medium", f"step() changes the dtype of a {actor.name} to {dtype}")
        if not self.stage.ask(self._alone):
            for name in ("transposed view", "strided view", "0-d tensor"):
                self.stage.ask(partial(self._plain, name))

    def _alone(self, draw: int) -> Finding | None:
        cast = [actor for actor in self.cast(draw) if actor.name in ("matrix", "vector")]
        mine = self.default(draw).paths[: len(cast)]
        gap = self.stage.worst(cast, mine, [self.stage.play([actor]).paths[0] for actor in cast], "together and alone")
        if gap is None:
            return None
        # Without a law it may be meant: a norm over all parameters, say.
        kind: Kind = FAULT if self.stage.context.law is not None else NOTE
        text = f"a {gap.actor.name} goes elsewhere beside other parameters than alone in an optimizer{gap.words}"
        others = [actor for actor in self.cast(draw) if actor is not gap.actor]
        calls = "params(), grads", "params()[-1:], [now[-1:] for now in grads]"
        return self.stage.finding(
            "parameters-interact", kind, "high", text, gap, self.stage.snippet([*others, gap.actor], gap.first, *calls)
        )

    def _plain(self, name: str, draw: int) -> Finding | None:
        """A view beside its contiguous copy, a 0-d tensor beside a tensor of one element."""
        found = self.find(name, draw)
        if found is None:
            return None
        actor, path = found
        shape = actor.start.shape or (1,)
        copy = Actor(name, actor.start.reshape(shape), [grad.reshape(shape) for grad in actor.grads if grad is not None])
        gap = self.stage.worst([copy], [path.reshape(-1, *shape)], self.stage.play([copy]).paths, name)
        if gap is None:
            return None
        what = "a tensor of one element" if name == "0-d tensor" else "its contiguous copy"
        text = f"a parameter that is a {name} goes elsewhere than {what}{gap.words}"
        flat = ", [[grad.reshape(1) for grad in now] for now in grads]" if name == "0-d tensor" else ", grads"
        same = f"[torch.nn.Parameter(weight.reshape({tuple(shape)}).clone()) for weight in weights]{flat}"
        snippet = self.stage.snippet([actor], gap.first, "params(), grads", same)
        return self.stage.finding(f"{name.replace(' ', '-')}-differs", FAULT, "medium", text, gap, snippet)

    def silence(self) -> None:
        """grad None: the weight stays, whether it never had a gradient or has one no more; a step without any is no crash."""
        moved = set()
        for name, when in _SILENT.items():
            found = self.find(name, 0)
            if found is None:
                continue
            actor, path = found
            path = torch.cat([actor.start.double()[None], path])
            sizes = [float((path[step + 1] - path[step]).abs().max()) for step in when]
            still = [size == 0 for size in sizes]
            if all(still):
                continue
            moved.add(name)
            step, size = next((step, size) for step, size in zip(when, sizes, strict=True) if size != 0)
            code = "frozen-moves" if name == "frozen parameter" else "none-grad-moves"
            if any(code == other.code for other in self.stage.result.findings):
                continue
            text = f"a weight moves though its grad is None ({name}): by {size:.3g} at step {step + 1}"
            text += "; None is taken for a gradient of zero, so that decay or old momentum moves it"
            calls = [f"params(), grads[:{step}]"] * (step > 0) + [f"params(), grads[:{step + 1}]"]
            self.stage.say(code, FAULT, "high", text, snippet=self.stage.snippet([actor], step + 1, *calls))
        if "paused parameter" in self.usable - moved:
            self.stage.ask(self._pause)
        silent = _without(self.stage.actor("matrix", 0, (3, 4), 2), range(2))
        try:
            self.stage.play([silent])
        except SubjectError as error:
            text, snippet = f"a step at which no parameter has a gradient: {error}", self.stage.snippet([silent], 1, "params(), grads")
            self.stage.say("crash-no-gradient", FAULT, "medium", text, snippet=snippet)

    def _pause(self, draw: int) -> Finding | None:
        """After a pause a parameter goes where it would go had those steps not been, unless one count of steps serves all."""
        found = self.find("paused parameter", draw)
        if found is None:
            return None
        actor, path = found
        kept = [step for step in range(_STEPS) if step not in _PAUSES]
        through = Actor(actor.name, actor.start, [actor.grads[step] for step in kept])
        gap = self.stage.worst([through], [path[kept]], self.stage.play([through]).paths, "after a pause")
        if gap is None:
            return None
        text = f"steps at which a parameter has no gradient count for its bias correction, unlike torch's{gap.words}"
        return self.stage.finding("steps-counted-without-gradient", NOTE, "low", text, gap)
