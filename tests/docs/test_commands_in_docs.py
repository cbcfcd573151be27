"""Every command in README.md and docs/*.md is run as it is printed, only smaller.

Where a page shows what an error prints, that is compared. What takes minutes at any size, or more
than one process, is at least understood by the real parser: `NOT_RUN` tells why.
"""

import io
import re
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from doc_pages import Block, all_commands, commands
from shrinking import shrunk, written_by

from vitrail.cli import COMMANDS, main, parse

pytestmark = pytest.mark.slow

# A pattern of commands: why it is not run, and what runs it instead.
NOT_RUN = {
    r"torchrun ": "it is for several processes: tests/training/test_distributed.py",
    r"vitrail reproduce ": "many training runs: tests/reproduction/test_reproduce_command.py",
}
FOUND = all_commands()
LEFT_OUT = [c for c in FOUND if any(re.match(pattern, c.text) for pattern in NOT_RUN)]
TRIED = {  # commands that differ in the name of a copy or of their output are run once
    tuple(word for before, word in pairwise(["", *shrunk(c.argv or [])]) if before != "--out"): c
    for c in FOUND
    if c not in LEFT_OUT
}.values()


@pytest.fixture
def started(here, monkeypatch):
    """What commands find when they begin: the time, a list that comes in, a server that ends."""
    monkeypatch.setattr("vitrail.cli.train.START_TIME", time.monotonic())
    incoming = io.BufferedReader(io.BytesIO(b"photos/0.jpg\nphotos/1.jpg\n"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(incoming))
    server = SimpleNamespace(run=lambda sockets: 0)
    monkeypatch.setattr("vitrail.serving.server.make_server", lambda app, state: server)
    interval = sys.getswitchinterval()
    yield here
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("command", TRIED, ids=str)
def test_a_command_of_the_pages_does_what_they_say(command, started, capsys):
    assert command.argv is not None
    make_room(command.argv)
    status = main(shrunk(command.argv))
    printed = capsys.readouterr()
    if command.output[:1] and command.output[0].startswith("vitrail: "):  # the page shows an error
        assert (status, printed.err.strip()) == (2, " ".join(command.output).strip())
    else:
        assert status == 0, printed.err
        assert printed.out.strip()


def make_room(argv: list[str]) -> None:
    """Take away what the command is to write; and let a run that is resumed be one that stopped."""
    for path in written_by(argv):
        assert not path.is_absolute(), "tests write into their own folder only"
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    if "--resume" in argv:
        out = Path(argv[argv.index("--out") + 1])
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree("runs/stopped", out)


@pytest.mark.parametrize("command", LEFT_OUT, ids=str)
def test_a_command_that_is_not_run_is_understood(command):
    assert command.argv
    assert isinstance(parse(command.argv), COMMANDS[command.argv[0]])


def test_commands_are_found_as_they_are_typed():
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command.text) for command in FOUND), pattern
    text = """$ vitrail check pictures/     # a comment
what it prints
$ vitrail train pictures/ \\
    --minutes 10
$ pip install vitrail
$ find photos -name '*.jpg' | vitrail predict runs/pictures -
$ KEY=1 vitrail serve runs/pictures
$ torchrun --nproc-per-node 2 -m vitrail train pictures/
$ vitrail train pictures/ --print-settings > mine.toml"""
    found = list(commands(Block("page.md", 1, "console", text)))
    assert [" ".join(command.argv or ["-"]) for command in found] == [
        *("check pictures/", "train pictures/ --minutes 10", "-", "predict runs/pictures -"),
        *("serve runs/pictures", "train pictures/", "train pictures/ --print-settings"),
    ]
    assert found[0].output == ("what it prints",)
