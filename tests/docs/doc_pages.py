"""Commands and blocks of README.md and docs/*.md."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROMPT = "$ "
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"\s+#\s.*$")
IN_TABLE = re.compile(r"^\|[^`]*\| `(vitrail [^`]+)` \|$", re.MULTILINE)  # | task | command |
ASSIGNMENT = re.compile(r"\w+=.*")


class Block(NamedTuple):
    """The text between two fences."""

    page: str  # docs/training.md
    line: int  # of its first line, in the page
    kind: str  # console, python, toml, …
    text: str


class Command(NamedTuple):
    """A command, and the output that the page shows below it."""

    page: str
    text: str  # on one line, without its comment
    output: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def argv(self) -> list[str] | None:
        """The arguments of `vitrail`, in any part of a pipe; None for another program."""
        words = shlex.split(self.text)
        if ">" in words:
            words = words[: words.index(">")]
        while words:
            end = words.index("|") if "|" in words else len(words)
            part, words = words[:end], words[end + 1 :]
            while part and ASSIGNMENT.fullmatch(part[0]):
                part = part[1:]
            if "-m" in part:  # python -m, torchrun -m
                part = part[part.index("-m") + 1 :]
            if part[:1] == ["vitrail"]:
                return part[1:]
        return None


def pages() -> list[Path]:
    folders = ("reproduction", "benchmarks")
    docs = sorted((ROOT / "docs").glob("*.md"))
    return [ROOT / "README.md", *docs, *(ROOT / name / "README.md" for name in folders)]


def blocks(page: Path, kind: str) -> list[Block]:
    """The blocks of one kind in a page."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, f"{name}: a block has no end"
    found = BLOCK.finditer(text)
    return [
        Block(name, text.count("\n", 0, x.start(2)) + 1, kind, x[2]) for x in found if x[1] == kind
    ]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block; a backslash continues one."""
    lines = block.text.replace("\\\n", " ").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(PROMPT)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = COMMENT.sub("", lines[start].removeprefix(PROMPT))
        yield Command(block.page, " ".join(text.split()), tuple(lines[start + 1 : end]))


def all_commands() -> list[Command]:
    """Every command of vitrail in the pages; one that several pages show, once."""
    found: dict[str, Command] = {}
    for page in pages():
        table = IN_TABLE.findall(page.read_text(encoding="utf-8"))
        listed = [Command(page.name, text) for text in table]
        listed += [command for block in blocks(page, "console") for command in commands(block)]
        for command in listed:
            if command.argv is not None:
                found.setdefault(command.text, command)
    return list(found.values())
