"""Links, commands and options that the pages mention exist; the index lists every page."""

import contextlib
import io
import re

import pytest
from doc_pages import ROOT, pages

from vitrail.cli import COMMANDS, main

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
INDEX = ROOT / "docs" / "README.md"
LISTED = [*pages(), ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
MENTIONED = re.compile(r"`(?:\w+=\S+ )*vitrail ([a-z]+)([^`]*)`")
TAKEN = re.compile(r"^\| `vitrail ([a-z]+)((?: [A-Z][A-Z=]+)*)", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
# Of pip, pip-audit, torchrun, curl, docker, systemctl, hf, and scripts of this repository.
FOREIGN = {
    *("--constraint", "--editable", "--index-url", "--all", "--exclude", "--exclude-editable"),
    *("--nproc-per-node", "--max-restarts", "--nnodes", "--node-rank", "--master-addr"),
    *("--master-port", "--data-binary", "--rm", "--now", "--local-dir", "--kills", "--svg"),
    *("--seconds", "--no-deps", "--disable-pip", "--init", "--read-only", "--tmpfs"),
}


@pytest.mark.parametrize("page", LISTED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for target, part in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        place = page.parent / target if target else page
        assert place.exists(), target
        if part:
            assert part in headings(place), f"{target}#{part}"


def headings(page) -> set[str]:
    """What the parts of a page are called in a link, as GitHub makes it of their titles."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_commands_are_in_console_blocks():
    """Only there they are found and run."""
    for page in pages():
        kinds = re.findall(r"^```(.*)\n((?:(?!```).*\n)*?)```", page.read_text(), re.MULTILINE)
        for kind, text in kinds:
            assert kind == "console" or not re.search(r"^(\$ )?vitrail ", text, re.MULTILINE), page


def test_the_index_lists_every_page():
    text = INDEX.read_text(encoding="utf-8")
    names = {page.name for page in INDEX.parent.glob("*.md")} - {INDEX.name}
    assert [name for name in names if f"({name})" not in text] == []


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The options of every command, as its help tells them."""
    return {name: set(OPTION.findall(help_of(name))) | {"--help"} for name in COMMANDS}


def help_of(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        main([name, "--help"])
    return printed.getvalue()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_mentions_exists(page, known):
    text = page.read_text(encoding="utf-8")
    for verb, words in MENTIONED.findall(text):
        assert verb in COMMANDS, f"vitrail {verb}"
        for option in OPTION.findall(words.partition(" -m ")[0]):
            assert option in known[verb], f"vitrail {verb} {option}"
    every = set().union(*known.values())
    assert set(OPTION.findall(text)) - every - FOREIGN - {"--version"} == set()


def test_help_calls_what_a_command_takes_as_the_table_of_commands_does():
    table = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    taken = {verb: words.split() for verb, words in TAKEN.findall(table)}
    assert taken.keys() == COMMANDS.keys()
    for verb, words in taken.items():
        usage = help_of(verb).partition("\n\n")[0]
        for word in words:
            assert re.search(rf"(?<![-\w]){word}(?!\w)", usage), usage
