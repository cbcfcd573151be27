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
from doc_pages import all_commands

from vitrail.cli import COMMANDS, main, parse
from vitrail.models.registry import CONFIGURATIONS

pytestmark = pytest.mark.slow

# A pattern of commands: why it is not run, and what runs it instead.
NOT_RUN = {
    r"torchrun ": "it is for several processes: tests/training/test_distributed.py",
    r"vitrail reproduce ": "many training runs: tests/reproduction/test_reproduce_command.py",
}
# Names in the docs, and what is used in their place.
STANDS_FOR = {"builtin:sign-digits": "pictures/", "/data/imagenet": "pictures/"}
STANDS_FOR |= {"runs/digits": "runs/pictures", "ViT-L_16.npz": "ViT-B_16.npz"}
# Values of options, where these are given.
LESS = {"--minutes": "0.01", "--epochs": "0.2", "--steps": "2", "--batch-size": "4"}
LESS |= {"--seeds": "2", "--images": "4", "--image-size": "32", "--port": "0"}
LESS |= {"--error-rate": "0.4"}
# Options that are added: of every run, of a run without a length, and of a new model.
RUN = {"--batch-size": "4", "--optim.warmup-steps": "0"}
LENGTHS = {"--minutes", "--epochs", "--steps"}
SMALL = {"--model.depth": "1", "--model.width": "32", "--model.mlp-width": "64"}
SMALL |= {"--model.heads": "2"}


def shrunk(argv: list[str]) -> list[str]:
    """The arguments of a command, changed as little as needed."""
    verb, words = "".join(argv[:1]), [STANDS_FOR.get(word, word) for word in argv]
    if verb == "plan":
        words = ["ViT-Mu/16" if word in CONFIGURATIONS else word for word in words]
        if "--data" in words:
            words = with_options(words, {"--batch-size": "4"}, add=False)
        return words if "--no-probe" in words else [*words, "--no-probe"]
    if {"--print-settings", "--resume", "--help"} & set(words):
        return words
    if verb == "doctor":
        return [*words, "--no-measure"]
    if verb == "train" and "--search" in words:  # several runs: their lengths, not the sum
        words = ["--steps" if word == "--minutes" else word for word in words]
    words, more = with_options(words, LESS, add=False), {}
    if verb in ("train", "finetune"):
        more = RUN if LENGTHS & set(words) else RUN | {"--steps": "2"}
    if verb == "train":
        more = more | SMALL
    if verb == "vtab" and "--method" not in words:
        more = {"--steps": "2", "--batch-size": "4", "--image-size": "32"}
    if verb == "serve":
        more = {"--port": "0"}
    return with_options(words, more, add=True)


def with_options(words: list[str], values: dict[str, str], *, add: bool) -> list[str]:
    """Replace the values of options, and `add` those that are not there."""
    words = list(words)
    for option, value in values.items():
        if option in words:
            words[words.index(option) + 1] = value
        elif add:
            words += [option, value]
    return words


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
    for option in {"--out", "--save-temperature", "--teach-to"}.intersection(argv):
        path = Path(argv[argv.index(option) + 1])
        assert not path.is_absolute(), "tests write into their own folder only"
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if "--resume" in argv:
            shutil.copytree("runs/stopped", path)


@pytest.mark.parametrize("command", LEFT_OUT, ids=str)
def test_a_command_that_is_not_run_is_understood(command):
    assert command.argv
    assert isinstance(parse(command.argv), COMMANDS[command.argv[0]])


def test_commands_are_found_and_reasons_needed():
    assert len(TRIED) > 90
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command.text) for command in FOUND), pattern
    assert any(command.output for command in FOUND)
