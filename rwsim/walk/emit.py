"""A rule's program as the Triton functions that the kernel of the fused engine calls."""

import linecache
import zlib
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace

from rwsim.walk.program import Program


def source(program: Program, varies: Sequence[bool]) -> str:
    """The functions that the kernel calls, as Triton source."""
    fixed = [i for i, moves in enumerate(varies) if not moves]
    moving = [i for i, moves in enumerate(varies) if moves]

    def listed(items: list[str]) -> str:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"

    calls = {
        "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "sqrt": "tl.sqrt({})",
        "rsqrt": "tl.rsqrt(tl.maximum({}, TINY))",
        "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0)).to(grad.dtype)",
    }  # fmt: skip
    buffers = [f"load(buffers + {k} * plane, column, base, C, E, L)" for k in range(len(program.buffers))]
    quarters = [listed([f"b{k}[{j}]" for k in range(len(buffers))]) for j in range(4)]
    whole = [listed([f"state[{j}][{k}]" for j in range(4)]) for k in range(len(buffers))]
    part = program.part if isinstance(program.part, str) else "grad * 0.0"
    lines = [
        "@triton.jit",
        "def LOAD(fixed, plane):",
        f"    return {listed([f'tl.load(fixed + {k} * plane)' for k in range(len(fixed))])}",
        "@triton.jit",
        "def READ(buffers, column, base, plane, C, E: tl.constexpr, L: tl.constexpr):",
        *[f"    b{k} = {text}" for k, text in enumerate(buffers)],
        f"    return {listed(quarters)}",
        "@triton.jit",
        "def STORE(state, buffers, column, base, inside, plane, C, E: tl.constexpr, L: tl.constexpr):",
        *[f"    store(buffers + {k} * plane, {text}, column, base, inside, C, E, L)" for k, text in enumerate(whole)],
        "    return",
        "@triton.jit",
        "def UPDATE(grad, param, state, fixed, varying, plane):",
        *[f"    {name} = state[{k}]" for k, name in enumerate(program.buffers)],
        *[f"    c{i} = fixed[{k}][None, :]" for k, i in enumerate(fixed)],
        *[f"    c{i} = tl.load(varying + {k} * plane)[None, :]" for k, i in enumerate(moving)],
        *[f"    {line.target} = {calls[line.op].format(*line.args)}" for line in program.body],
        f"    return {program.param}, {listed([str(x) for x in program.new])}, {part}",
    ]
    return "\n".join(lines) + "\n"


@lru_cache
def compiled(text: str) -> SimpleNamespace:
    """The functions of a source; Triton reads a function's text back from its file, so it is given one."""
    import triton
    import triton.language as tl

    from rwsim.walk import kernel

    name = f"<rwsim fused {zlib.crc32(text.encode()):08x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {"triton": triton, "tl": tl, "TINY": tl.constexpr(1e-37), "load": kernel.load, "store": kernel.store, "__name__": __name__}
    exec(compile(text, name, "exec"), scope)
    return SimpleNamespace(**{key: scope[key] for key in ("LOAD", "READ", "STORE", "UPDATE")})
