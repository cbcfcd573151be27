"""The pages hold together: every link leads somewhere, and the index lists all of them."""

import re

import pytest
from doc_pages import ROOT, pages

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
INDEX = ROOT / "docs" / "README.md"
LISTED = [*pages(), ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]


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
