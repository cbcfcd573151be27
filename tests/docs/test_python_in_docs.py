"""Every block of Python in README.md and docs/*.md is run, a page's blocks one after the other."""

import re

import pytest
from doc_pages import ROOT, Block, blocks, pages

import vitrail

pytestmark = pytest.mark.slow

# Words in a block: why it is not run here, and what runs it instead.
NOT_RUN = {
    'torch.export.load("model.pt2")': "it takes long to make: tests/export/test_export_api.py",
    "session = onnxruntime.InferenceSession(sys.argv[1])": "tests/export/test_export_page.py",
    "http://127.0.0.1:8000/predict": "it needs a server: tests/serving/test_serving_docs.py",
}
# What is printed, and what is run: the same, only smaller.
SMALLER = {
    'create("ViT-B/16"': 'create("ViT-Ti/16"',
    '"builtin:sign-digits"': '"pictures/"',
    "minutes=3": "steps=2",
    "minutes=5": "steps=2",
    "minutes=10": "steps=2",
    "epochs=20": "steps=2",
    "epochs=4": "steps=2",
}


def to_run(block: Block) -> bool:
    return not any(words in block.text for words in NOT_RUN)


FOUND = {page.relative_to(ROOT).as_posix(): blocks(page, "python") for page in pages()}
RUN = {page: found for page, all in FOUND.items() if (found := [*filter(to_run, all)])}


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, here, capsys):
    names: dict[str, object] = {"__name__": "page"}
    for block in RUN[page]:
        text = block.text
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        code = compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec")
        exec(code, names)


def test_every_reason_not_to_run_a_block_is_needed():
    for words in NOT_RUN:
        assert any(words in block.text for found in FOUND.values() for block in found)


def test_the_page_about_python_uses_every_public_name():
    used = set(re.findall(r"vitrail\.(\w+)", "".join(b.text for b in FOUND["docs/python.md"])))
    assert sorted(set(vitrail.__all__) - used) == []
