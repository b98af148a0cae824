"""The child process in which a class under audit runs: what it does there, its end included, is evidence.

The child is forked, so that a class that exists only in the caller's session can be audited. It sends what each probe found
as soon as that is found; if it dies or hangs, what was sent is kept, the probe under way is marked, and another child goes
on with those that are left. A child leads a session of its own and dies with all that it started.
"""

import ctypes
import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import torch

from rwsim.errors import Unavailable

# More output than STORM is a finding; a child that prints more than _FLOOD is ended; writing more fails in the child itself.
STORM, _FLOOD, _OUTPUT_LIMIT = 1 << 16, 32 << 20, 1 << 30
# How often the parent looks whether the child lives and what it takes, in milliseconds; what it says is read at once.
_GLANCE = 50
# Longer than what a fatal signal writes: a traceback and the names of all extension modules.
_TRACE = 1 << 16
# On this signal a child says where it is.
_ASK = signal.SIGUSR1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Message:
    """What a child says of one task: `kind` is ``loaded``, ``begun``, ``done`` or ``refused``; `value` is plain data that belongs to it."""

    task: str
    kind: str
    value: Any = None


@dataclass(frozen=True)
class Death:
    """How a child ended before its time.

    Attributes:
        task: What it was doing; empty before the first task.
        code: ``crash``, ``exits``, ``hang``, ``memory``, ``print-storm``; ``internal`` where rwsim itself is to blame.
        how: In words.
        output: The end of what it had printed.
        loaded: Whether the import was over.
    """

    task: str
    code: str
    how: str
    output: str
    loaded: bool


def clean(text: str) -> str:
    """Without addresses, which differ from run to run."""
    return re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text)


def _quiet(log: BinaryIO, memory: int) -> None:
    """Make this process the child: its own session, output to a file, limits set, one thread."""
    import resource

    os.setsid()
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the audit
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays its descendant, so that all of it can be found
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, null), (1, log.fileno()), (2, log.fileno())):
        os.dup2(source, number)
    # pytest and notebooks replace these objects; the child's own go to the file. The old ones are kept: closing them would close it.
    _KEPT.extend([sys.stdin, sys.stdout, sys.stderr])
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    faulthandler.enable(2, all_threads=False)
    faulthandler.register(_ASK, file=2, all_threads=False)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    limits = [(resource.RLIMIT_FSIZE, _OUTPUT_LIMIT), (resource.RLIMIT_CORE, 0)]
    if torch.version.cuda is None and torch.version.hip is None:  # GPU drivers reserve address space without end
        limits.append((resource.RLIMIT_AS, memory + _pages(os.getpid())[0]))
    for limit, value in limits:
        hard = resource.getrlimit(limit)[1]
        with suppress(ValueError, OSError):  # a lower hard limit stays
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    torch.set_num_threads(1)


_KEPT: list[Any] = []


def _child(work: Callable[[Callable[[Message], None]], None], send: int, log: BinaryIO, memory: int) -> None:
    """All that the child ever does; it does not return."""

    def tell(message: Message) -> None:
        # Plain text, a line each: what a class under audit might hide in a pickle is not loaded.
        text = json.dumps([message.task, message.kind, message.value], default=str).encode() + b"\n"
        try:
            while text:
                text = text[os.write(send, text) :]
        except OSError:
            os._exit(_CUT)

    try:
        _quiet(log, memory)
        work(tell)
        tell(Message("", "end"))
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        tell(Message("", "flushed"))
        time.sleep(5)  # the parent ends it, and what it started, in the meantime
    except BaseException as error:
        tell(Message("", "broken", f"{type(error).__name__}: {error}"))
    finally:
        # Neither the caller's exit handlers nor its buffers belong to the child.
        os._exit(0)


# Exit status of a child whose way to the parent is closed.
_CUT = 113


@dataclass
class _Process:
    """A child as the parent sees it."""

    pid: int
    pipe: int
    log: BinaryIO
    status: int | None = None
    buffer: bytes = b""
    poll: Any = field(default_factory=select.poll)

    def lines(self) -> Iterator[Message]:
        """What it said since the last look; waits a glance for more."""
        while self.pipe >= 0 and self.poll.poll(0 if self.status is not None else _GLANCE):
            data = os.read(self.pipe, 1 << 16)
            if not data:
                self.hang_up()
                break
            *whole, self.buffer = (self.buffer + data).split(b"\n")
            for line in whole:
                yield Message(*json.loads(line))
            if whole:
                break
        else:
            if self.pipe < 0:
                time.sleep(_GLANCE / 1000)

    def hang_up(self) -> None:
        if self.pipe >= 0:
            self.poll.unregister(self.pipe)
            os.close(self.pipe)
            self.pipe = -1

    def ended(self) -> bool:
        """Whether the process has ended, and `status` tells how."""
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else's handler waited for it
                pid, status = self.pid, 0
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def end(self) -> None:
        """Kill it and everything that it started."""
        family = [] if self.ended() else _descendants(self.pid)
        for pid in [*([] if self.ended() else [self.pid]), *family]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.hang_up()

    def printed(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def tail(self, size: int) -> str:
        end = self.printed()
        return os.pread(self.log.fileno(), size, max(end - size, 0)).decode(errors="replace")


def _descendants(pid: int) -> list[int]:
    """Its children, their children and so on, where the system lists processes in /proc."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                    children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(entry))
    found, left = [], [pid]
    while left:
        mine = children.get(left.pop(), [])
        found += mine
        left += mine
    return found


def _pages(pid: int) -> tuple[int, int]:
    """Bytes of address space and of memory that a process takes; (0, 0) where the system does not say."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/statm") as file:
        size, resident = file.read().split()[:2]
        page = os.sysconf("SC_PAGE_SIZE")
        return int(size) * page, int(resident) * page
    return 0, 0


@contextmanager
def _forked(work: Callable[[Callable[[Message], None]], None], memory: int) -> Iterator[_Process]:
    if not hasattr(os, "fork"):
        raise Unavailable(
            "an audit runs the optimizer in a forked process, and this system has no fork: run it on Linux (on Windows in WSL) or macOS"
        )
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # what is buffered is the caller's: the child must not print it again
            stream.flush()
    with tempfile.TemporaryFile() as log:
        receive, send = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forking a process of many threads. The child takes no lock of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _child(work, send, log, memory)
        process = _Process(pid, receive, log)
        process.poll.register(receive, select.POLLIN)
        os.close(send)
        try:
            yield process
        finally:
            process.end()


def run(
    work: Callable[[Sequence[str], Callable[[Message], None]], None], tasks: Sequence[str], *, seconds: float, memory: int
) -> Generator[Message | Death, None, None]:
    """Do tasks in a child, in another one after each that dies.

    Args:
        work: Runs in the child: loads the class and says ``loaded``, does the tasks in order and says ``begun`` before each, whatever
            it finds, and ``done`` after.
        tasks: Names of the tasks.
        seconds: Time that one task may take. Loading may take twice as much; after a hang, later tasks get a third.
        memory: Address space and resident memory of a child beside what the caller has, in bytes.

    Yields:
        What the children say, how much they printed if that is much, and how those ended that did not reach their end.

    Raises:
        Unavailable: The system cannot fork.
    """
    left = list(tasks)
    while left:
        mine = tuple(left)
        with _forked(partial(work, mine), memory) as child:
            death = yield from _watched(child, seconds, memory)
            if (size := child.printed()) > STORM and (death is None or death.code != "print-storm"):
                yield Message("", "printed", (size, child.tail(200).strip()))
            if death is None:
                return
            yield death
        if not death.task:
            return
        left = left[left.index(death.task) + 1 :]
        if death.code == "hang":
            seconds = min(seconds, max(seconds / 3, 5.0))


def _watched(child: _Process, seconds: float, memory: int) -> Generator[Message, None, Death | None]:
    """What a child says, until it has said all (None is returned) or died (its `Death` is)."""
    task, loaded, allowed = "", False, 2 * seconds
    limit, most = time.monotonic() + allowed, memory + _pages(os.getpid())[1]

    def dead(code: str, how: str) -> Death:
        return Death(task, code, how, _last_words(child.tail(_TRACE)), loaded)

    ending = False
    while True:
        gone = child.ended()  # before reading: what it said before its end is then there
        try:
            for message in child.lines():
                if message.kind == "flushed":
                    return None
                if message.kind == "broken":
                    return dead("internal", str(message.value))
                if message.kind == "end":
                    ending = True
                    continue
                if message.kind == "loaded":
                    loaded = True
                if message.kind == "begun":
                    task = message.task
                allowed = seconds
                limit = time.monotonic() + allowed
                if message.kind in ("begun", "done"):
                    yield message
                if message.kind == "refused":
                    yield message
                    return None
        except (ValueError, TypeError):
            return dead("crash", "wrote into the pipe through which the audit talks to its process")
        if gone and (child.pipe < 0 or not child.poll.poll(0)):
            if ending:
                return None
            return dead(*_ending(child))
        if child.printed() > _FLOOD:
            return dead("print-storm", f"printed more than {_FLOOD >> 20} MiB")
        if _pages(child.pid)[1] > most:
            return dead("memory", f"took more than {memory / 2**30:.3g} GiB of memory")
        if time.monotonic() > limit:
            before = child.tail(_TRACE)
            where = _held(child)
            if where is None:
                return Death(task, "internal", f"rwsim's own work did not end within {allowed:g} s", _last_words(before), loaded)
            return Death(task, "hang", f"did not end within {allowed:g} s{where}", _last_words(before), loaded)


def _ending(child: _Process) -> tuple[str, str]:
    code = child.status or 0
    if code == _CUT:
        return "crash", "closed files that are not its own, among them the audit's"
    if code < 0:
        try:
            how = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was killed by signal {-code}"
        return "crash", how + _place(child.tail(_TRACE))
    return "exits", f"ended the process with exit status {code}"


def _held(child: _Process) -> str | None:
    """Where it hangs: the function that the audit or an import called; None if it is rwsim's own."""
    start = child.printed()
    with suppress(ProcessLookupError):
        os.kill(child.pid, _ASK)
    until = time.monotonic() + 0.5
    while child.printed() == start and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', os.pread(child.log.fileno(), 1 << 16, start).decode(errors="replace"))
    own = os.path.dirname(os.path.dirname(__file__))
    inner: list[str] = []
    for path, name in frames:
        if path.startswith(own):
            if not inner and f"{os.sep}subject.py" not in path:
                return None
            break
        if f"{os.sep}torch{os.sep}" not in path and not path.startswith("<frozen"):
            inner.append(f" in {name} of {os.path.basename(path)}")
    return inner[-1] if inner else ""


def _place(text: str) -> str:
    """Where it was, by the traceback that a fatal signal leaves."""
    _, fatal, stack = text.rpartition("Fatal Python error")
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack) if fatal else []
    library = os.path.dirname(os.__file__)
    own = [frame for frame in frames if not frame[0].startswith(library) or "site-packages" in frame[0]] or frames
    return f" at line {own[0][1]} of {os.path.basename(own[0][0])}, in {own[0][2]}," if own else ""


def _last_words(text: str) -> str:
    """The end of what it printed, without the traceback of a fatal signal."""
    return clean(text.partition("Fatal Python error")[0].strip()[-200:])
