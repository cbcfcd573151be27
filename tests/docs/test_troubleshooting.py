"""The messages that docs/troubleshooting.md explains are worded as the code words them."""

import ast
import re

import pytest
from doc_pages import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"^\*\*(`{1,2})(.+?)\1\*\*$", re.MULTILINE)
ENOUGH = 12  # letters of a message that are fixed; less could be anything
MESSAGES = [found[1].strip() for found in QUOTED.findall(PAGE.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def known() -> list[re.Pattern[str]]:
    """Every text in the source that is long enough to be unambiguous."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = constants_of(tree)
        for node in ast.walk(tree):
            parts = parts_of(node, constants)
            if sum(len(part) for part in parts if part is not None) >= ENOUGH:
                found.add("".join(".*" if part is None else re.escape(part) for part in parts))
    return [re.compile(pattern) for pattern in sorted(found)]


def constants_of(tree: ast.Module) -> dict[str, str]:
    """The texts that have a name in a module."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(id=name)], ast.Constant(value=str(text))):
                found[name] = text
    return found


def parts_of(node: ast.AST, constants: dict[str, str]) -> list[str | None]:
    """A text of the code in parts, None where it puts a value."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.FormattedValue(value=ast.Name(id=name)):
            return [constants.get(name)]
        case ast.JoinedStr(values=values):
            return [part for value in values for part in parts_of(value, constants) or [None]]
    return []


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_worded_as_the_code_words_it(message, known):
    assert any(pattern.fullmatch(message) for pattern in known)


def test_thirty_messages_are_explained(known):
    assert not any(pattern.fullmatch("Dataset not found, sorry") for pattern in known)
    assert len(set(MESSAGES)) >= 30
