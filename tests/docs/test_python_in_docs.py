"""Every block of Python in README.md and docs/*.md is run, a page's blocks one after the other."""

import re

import pytest
from doc_pages import ROOT, blocks, pages

import vitrail

pytestmark = pytest.mark.slow

# Words in a block: why it is not run here, and what runs it instead.
NOT_RUN = {
    'torch.export.load("model.pt2")': "it takes long to make: tests/export/test_export_api.py",
    "session = onnxruntime.InferenceSession(sys.argv[1])": "tests/export/test_export_page.py",
    "http://127.0.0.1:8000/predict": "it needs a server: tests/serving/test_serving_docs.py",
}
# What is printed, and what is run: the same, only smaller.
SMALLER = {'create("ViT-B/16"': 'create("ViT-Ti/16"', '"builtin:sign-digits"': '"pictures/"'}
SMALLER |= dict.fromkeys(
    ("minutes=3", "minutes=5", "minutes=10", "epochs=20", "epochs=4"), "steps=2"
)


FOUND = {page.relative_to(ROOT).as_posix(): blocks(page, "python") for page in pages()}
RUN = {
    page: [block for block in found if not any(words in block.text for words in NOT_RUN)]
    for page, found in FOUND.items()
}


@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_the_python_of_a_page_runs_from_top_to_bottom(page, here, capsys):
    names: dict[str, object] = {"__name__": "page"}
    for block in RUN[page]:
        text = block.text
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        code = compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec")
        exec(code, names)


def test_reasons_are_needed_and_the_page_about_python_uses_every_public_name():
    for words in NOT_RUN:
        assert any(words in block.text for found in FOUND.values() for block in found)
    used = set(re.findall(r"vitrail\.(\w+)", "".join(b.text for b in FOUND["docs/python.md"])))
    assert sorted(set(vitrail.__all__) - used) == []
