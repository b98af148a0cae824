"""The pages of docs/ are executed, block by block, in a directory of their own; printed output is compared."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import rwsim
from tests.forked import python

ROOT = Path(rwsim.__file__).parent.parent


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if blocks(page.read_text())]


def run_page(text: str, directory: Path) -> int:
    """Execute a page's blocks in order; the number that ran.

    python: written to a file if its first line names one, else run. sh: run; `# exit status N` states the expected status
    (0 if absent). text: every line must occur in what the block before it printed, spaces aside.
    """
    scripts = directory / "bin"
    scripts.mkdir()
    (scripts / "rwsim").write_text(f'#!/bin/sh\nexec {shlex.join(python())} -m rwsim.cli "$@"\n')
    (scripts / "rwsim").chmod(0o755)
    path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    printed, ran = "", 0
    for language, content in blocks(text):
        first = content.splitlines()[0]
        expected = 0
        if language == "text":
            for line in content.split("\n"):
                assert " ".join(line.split()) in printed, f"not printed: {line!r}, but: {printed!r}"
            continue
        if language == "python" and (named := re.fullmatch(r"# (\w+\.py)", first)):
            (directory / named[1]).write_text(content)
            continue
        if language == "python":
            command = [*python(), "-c", content]
        else:
            assert language == "sh", f"no way to run {language}"
            command = ["sh", "-e", "-c", content]
            if stated := re.search(r"# exit status (\d)", content):
                expected = int(stated[1])
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == expected, f"exit status {done.returncode}, not {expected}:\n{content}\n{done.stdout}{done.stderr}"
        printed, ran = " ".join((done.stdout + done.stderr).split()), ran + 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_run(page, tmp_path):
    assert run_page(page.read_text(), tmp_path) >= 1


def test_there_are_pages():
    assert "your-own-rule.md" in {page.name for page in PAGES}


BROKEN = {
    "a python block that fails": ("```python\nassert 1 == 2\n```\n", "exit status 1, not 0"),
    "a command that fails": ("```sh\nfalse\n```\n", "exit status 1, not 0"),
    "a command that should fail": ("```sh\ntrue  # exit status 2\n```\n", "exit status 0, not 2"),
    "output that is not printed": ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "not printed: '2'"),
    "a block of another language": ("```toml\na = 1\n```\n", "no way to run toml"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rejects(name, tmp_path):
    text, message = BROKEN[name]
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_page(text, tmp_path)
