"""Python processes that start in a tenth of a second: forked from one that has loaded the libraries, but nothing of rwsim.

What every start takes (torch, sympy, SciPy: up to eight seconds of CPU) is so paid once for a pytest process. `python()` is a command
like `python`, for `-c CODE` and `-m MODULE`: own directory, environment and streams, SIGINT and SIGKILL reach it, and what it imports of
rwsim is imported anew.
This file is the server (`forked.py SOCKET`, until its stdin ends) and the client (`forked.py SOCKET -c CODE`) too.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# `torch._dynamo` is what the first optimizer of a process imports.
LIBRARIES = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict",
    "sympy.physics.units", "sympy.printing.numpy", "scipy.stats", "pydantic", "cyclopts", "rich.table", "matplotlib.pyplot",
    "xarray", "pytest",
]  # fmt: skip


@cache
def python() -> tuple[str, ...]:
    """The command; the server starts with the first call and ends with this process. Elsewhere than on Linux it is plain `python`."""
    import atexit
    import subprocess
    import tempfile

    if sys.platform != "linux":
        return (sys.executable,)
    folder = tempfile.TemporaryDirectory(prefix="rwsim-")  # for its owner only
    # -P, -S: tests/ is not on the path; a client needs no site-packages.
    start = [sys.executable, "-P", __file__, f"{folder.name}/socket"]
    env = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    server = subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    server.stdout.close()
    for end in (folder.cleanup, server.wait, server.stdin.close):  # in reverse
        atexit.register(end)
    return (start[0], "-P", "-S", *start[2:])


def together(calls: Sequence[str], seconds: float) -> list[str]:
    """Run code of the tests side by side, each in a process of its own; what each says on stderr. All are killed after `seconds`."""
    import subprocess

    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*python(), "-c", code], env=env, stderr=subprocess.PIPE, text=True) for code in calls]
    deadline, said = time.monotonic() + seconds, []
    for process in processes:
        try:
            said.append(process.communicate(timeout=max(0.0, deadline - time.monotonic()))[1])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(f"killed after {seconds} s: {process.communicate()[1]}")
    return said


def serve(place: str) -> None:
    import contextlib
    import gc
    import importlib
    import threading

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # some are extras; who needs one hears of it
            importlib.import_module(name)
    assert threading.active_count() == 1, "a thread does not survive a fork"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    while 0 not in select.select([listener.fileno(), 0], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _attend(client)
        client.close()
    os._exit(0)  # Triton's bindings complain of a regular end


def _attend(client: socket.socket) -> None:
    """Fork a process for a client and tell its exit status; it hears the client's Ctrl-C and ends with it. Does not return."""
    streams = socket.recv_fds(client, 1, 3)[1]
    arguments, directory, env = json.loads(client.makefile().readline())
    if (worker := os.fork()) == 0:
        os.setsid()
        client.close()
        os._exit(_run(streams, arguments, directory, env))
    for stream in streams:
        os.close(stream)
    done = os.pidfd_open(worker)
    while done not in select.select([client.fileno(), done], [], [])[0]:
        if not client.recv(1):
            os.killpg(worker, signal.SIGKILL)
            break
        os.kill(worker, signal.SIGINT)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    client.sendall(bytes([status if status >= 0 else 128 - status]))
    os._exit(0)


def _run(streams: list[int], arguments: list[str], directory: str, env: dict[str, str]) -> int:
    """What `python ARGUMENTS` does; its exit status."""
    import atexit
    import random
    import runpy
    import traceback
    from types import ModuleType

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    (kind, what), rest = arguments[:2], arguments[2:]
    sys.path[:0] = ["" if kind == "-c" else directory, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    random.seed()
    code: object = None
    try:
        if kind == "-m":
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            assert kind == "-c", f"neither -c nor -m: {arguments}"
            sys.argv = ["-c", *rest]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    for written in (sys.stdout, sys.stderr):
        try:
            written.flush()
        except OSError:
            code = 120  # as Python's own
    return int(code or 0)


def ask(place: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [b"\0"], [0, 1, 2])
        server.sendall(json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode() + b"\n")
        signal.signal(signal.SIGINT, lambda *_: server.sendall(b"c"))
        status = server.recv(1)
    return status[0] if status else 125  # the server is gone


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
