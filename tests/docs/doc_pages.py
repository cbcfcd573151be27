"""What README.md and docs/*.md tell a reader to type: commands, and blocks of Python."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMPT = "$ "
COMMENT = re.compile(r"\s+#\s.*$")
IN_TABLE = re.compile(r"^\|[^`]*\| `(vitrail [^`]+)` \|$")  # what you want | the command
ASSIGNMENT = re.compile(r"\w+=.*")


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str  # docs/training.md
    line: int  # of its first line, in the page
    kind: str  # console, python, toml, …
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass(frozen=True)
class Command:
    """A line that a reader types, and what the page shows under it."""

    page: str
    line: int
    text: str  # on one line, without its comment
    told: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def argv(self) -> list[str] | None:
        """What `vitrail` is given; None for another program's command."""
        return argv_of(shlex.split(self.text))


def pages() -> list[Path]:
    """All that is for readers, in the order of their names."""
    docs = sorted((ROOT / "docs").glob("*.md"))
    return [
        ROOT / "README.md",
        *docs,
        *(ROOT / name / "README.md" for name in ("reproduction", "benchmarks")),
    ]


def blocks(page: Path, kind: str) -> list[Block]:
    """The blocks of one kind in a page."""
    called = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    lines = page.read_text(encoding="utf-8").splitlines()
    return [block for block in fenced(called, lines) if block.kind == kind]


def fenced(page: str, lines: list[str]) -> Iterator[Block]:
    begun: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begun is None:
            begun = number
        else:
            kind = lines[begun].removeprefix("```").strip()
            yield Block(page, begun + 2, kind, tuple(lines[begun + 1 : number]))
            begun = None
    assert begun is None, f"{page}: the block of line {begun} has no end"


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block; one that goes on behind a backslash is one."""
    place = 0
    while place < len(block.lines):
        start, line = place, block.lines[place]
        place += 1
        if not line.startswith(PROMPT):
            continue
        while line.endswith("\\"):
            line = f"{line[:-1]} {block.lines[place]}"
            place += 1
        told = []
        while place < len(block.lines) and not block.lines[place].startswith(PROMPT):
            told.append(block.lines[place])
            place += 1
        text = " ".join(COMMENT.sub("", line.removeprefix(PROMPT)).split())
        yield Command(block.page, block.line + start, text, tuple(told))


def in_tables(page: Path) -> Iterator[Command]:
    """The commands that are the last cell of a row."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if match := IN_TABLE.match(line):
            yield Command(page.name, number, match[1])


def argv_of(words: list[str]) -> list[str] | None:
    """The words behind `vitrail`, in whichever part of a pipe it stands and whoever starts it."""
    if ">" in words:
        words = words[: words.index(">")]
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        while part and ASSIGNMENT.fullmatch(part[0]):
            part = part[1:]
        if part[:1] == ["vitrail"]:
            return part[1:]
        if "-m" in part and part[part.index("-m") + 1 :][:1] == ["vitrail"]:
            return part[part.index("-m") + 2 :]
    return None


def all_commands() -> list[Command]:
    """Every command of vitrail's in the pages; one that several show, once."""
    found: dict[str, Command] = {}
    for page in pages():
        in_blocks = [c for block in blocks(page, "console") for c in commands(block)]
        for command in [*in_tables(page), *in_blocks]:
            if command.argv is not None:
                found.setdefault(command.text, command)
    return list(found.values())
