"""docs/house.md tells the truth, and the house stays as small as it says.

That no file is longer than 700 lines, and that arrows point one way, is in test_architecture.py.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from vitrail.models.build import build
from vitrail.models.registry import configuration
from vitrail.models.vit import VisionTransformer

sys.path.append(str(Path(__file__).parents[1] / "scripts"))  # they are on no package's path

import imports
import sizes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "house.md"
MOST_LONG = 0.03  # of the functions


@pytest.fixture(scope="module")
def source():
    return sizes.sizes_of("src")


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


def test_at_most_3_percent_of_the_functions_have_more_than_50_lines(source):
    long = [f"{f.name} in {f.file}:{f.line}, {f.lines} lines" for f in source.long_functions]
    assert source.share <= MOST_LONG, "\n".join(long)


def test_every_function_on_the_way_of_a_batch_is_where_the_page_says(source, page):
    told = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert len(told) > 20, "the table is read"
    told += re.findall(r"`([\w.]+)`\s(?:in |\()`([\w/]+\.py)`", page)  # and those in sentences
    there = {(f.name, f.file) for f in source.functions}
    lost = [
        f"{name} in {file}" for name, file in told if (name, f"src/vitrail/{file}") not in there
    ]
    assert not lost, "; ".join(lost)


def test_every_file_that_the_page_names_is_there(page):
    named = re.findall(r"`([\w/]+\.py)`", page)
    lost = [n for n in named if not any((ROOT / top / n).exists() for top in ("src/vitrail", "."))]
    assert not lost


@torch.no_grad()
def test_the_shapes_on_the_way_of_a_batch_are_those_of_vit_b16(page):
    config = configuration("ViT-B/16").change(depth=1)  # as many blocks as shapes depend on
    model = build(config, device="cpu").eval()
    assert isinstance(model, VisionTransformer)
    images = torch.zeros(1, 3, 224, 224)
    patches = model.embed_patches(images)
    tokens, grid = model.assemble_tokens(patches)
    found = [
        *(images, patches, tokens),
        model.encoder.blocks[0].attention.query_key_value(tokens)[0],
        model.encoder(tokens, grid, model.head_tokens),
        *(model.features(images), model(images)),
    ]
    for tensor in found:
        assert f"(B, {', '.join(map(str, tensor.shape[1:]))})" in page


def test_a_part_stands_above_all_that_it_imports_and_implied_arrows_are_not_drawn():
    graph = {"cli": {"training", "data"}, "training": {"data"}, "data": set()}
    assert imports.layers(graph) == {"data": 0, "training": 1, "cli": 2}
    assert imports.told(graph) == {"cli": {"training"}, "training": {"data"}, "data": set()}


def test_a_circle_of_imports_is_refused():
    with pytest.raises(SystemExit, match="cli imports data imports cli: a circle"):
        imports.layers({"cli": {"data"}, "data": {"cli"}})


def test_functions_are_counted_with_their_classes_and_what_is_inside(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.py").write_text(
        "class A:\n    @property\n    def f(self):\n        def g():\n            return 1\n"
        "        return g\n",
        encoding="utf-8",
    )
    found = sizes.sizes_of("one", tmp_path)
    assert found.files == {"one/file.py": 6}
    told = [(f.name, f.line, f.lines) for f in found.functions]
    assert told == [("A.f", 3, 4), ("A.f.g", 4, 2)]


def test_the_tables_have_a_row_for_each_anchor_and_for_each_part(source):
    assert len(sizes.anchor_table(source)) == 2 + 1 + len(sizes.ANCHORS)
    graph = {"data": {"errors"}, "errors": set()}
    lines = list(imports.table(graph, {name: imports.Part(1, 2000) for name in graph}))
    assert lines[2:] == [
        "| data | 1 | 1 | 2,000 | errors |",
        "| errors | 0 | 1 | 2,000 | nothing |",
    ]
