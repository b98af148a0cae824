"""The child process in which a class under audit runs: what it does there, its end included, is evidence.

The child is forked, so that a class that exists only in the caller's session can be audited. It sends what each probe found
as soon as that is found; if it dies or hangs, what was sent is kept, the probe under way is marked, and another child goes
on with those that are left.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import torch

# A child may write this much to its output before writing fails; more than _STORM of it is a finding.
_OUTPUT_LIMIT = 64 << 20
STORM = 1 << 16


@dataclass(frozen=True)
class Message:
    """What a child says of one task: `kind` is ``begun``, ``done`` or ``refused``; `value` is plain data that belongs to it."""

    task: str
    kind: str
    value: Any = None


@dataclass(frozen=True)
class Death:
    """How a child ended before its time.

    Attributes:
        task: What it was doing; empty before the first task.
        how: In words.
        output: The end of what it had printed.
    """

    task: str
    how: str
    output: str


def _quiet(log: BinaryIO, memory: int) -> None:
    """Make this process the child: output to a file, limits set, one thread, no compilation."""
    sys.stdin = open(os.devnull)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # pytest and notebooks replace these objects; the child's own go to the file.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    for limit, value in ((resource.RLIMIT_FSIZE, _OUTPUT_LIMIT), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        with suppress(ValueError, OSError):  # a lower hard limit stays
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    torch.set_num_threads(1)


def _child(work: Callable[[Callable[[Message], None]], None], send: Connection, log: BinaryIO, memory: int) -> None:
    _quiet(log, memory)

    def tell(message: Message) -> None:
        # Plain text: what a class under audit might hide in a pickle is not loaded.
        send.send_bytes(json.dumps([message.task, message.kind, message.value]).encode())

    work(tell)
    tell(Message("", "end"))
    sys.stdout.flush()
    # Neither the caller's exit handlers nor its buffers belong to the child.
    os._exit(0)


@contextmanager
def _forked(work: Callable[[Callable[[Message], None]], None], memory: int) -> Iterator[tuple[Any, Connection, BinaryIO]]:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as log:
        process = context.Process(target=_child, args=(work, send, log, memory), daemon=True)
        with warnings.catch_warnings():
            # Python warns of forking a process of many threads. The child starts none, and takes no lock of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        send.close()
        try:
            yield process, receive, log
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            receive.close()


def _printed(log: BinaryIO) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), 2000, max(size - 2000, 0)).decode(errors="replace").strip()


def run(
    work: Callable[[Sequence[str], Callable[[Message], None]], None], tasks: Sequence[str], *, seconds: float, memory: int
) -> Iterator[Message | Death]:
    """Do tasks in a child, in another one after each that dies.

    Args:
        work: Runs in the child: does the tasks in order and sends a ``begun`` before each, whatever it finds, a ``done`` after.
        tasks: Names of the tasks.
        seconds: Time that one task may take.
        memory: Address space of a child, in bytes.

    Yields:
        What the children say, and how those ended that did not reach their end.
    """
    left = list(tasks)
    while left:
        task, limit = "", time.monotonic() + seconds
        mine = tuple(left)
        with _forked(lambda send, mine=mine: work(mine, send), memory) as (process, receive, log):
            how = ""
            while not how:
                if not receive.poll(max(limit - time.monotonic(), 0)):
                    how = f"did not end within {seconds:g} s"
                    break
                try:
                    message = Message(*json.loads(receive.recv_bytes()))
                except (EOFError, OSError):
                    process.join(5)
                    how = _ending(process.exitcode)
                    break
                if message.kind == "end":
                    size = os.fstat(log.fileno()).st_size
                    if size > STORM:
                        yield Message("", "printed", (size, _printed(log)))
                    return
                if message.kind == "begun":
                    task, limit = message.task, time.monotonic() + seconds
                if message.kind == "done":
                    limit = time.monotonic() + seconds
                yield message
                if message.kind == "refused":
                    return
            yield Death(task, how, _printed(log))
        if not task:
            return
        left = left[left.index(task) + 1 :]


def _ending(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended the process with exit status {code}"
