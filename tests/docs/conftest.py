"""What the tests of the pages share: a folder with everything the pages speak of."""

import shutil
from pathlib import Path

import pytest
from sandbox import build

from vitrail.checkpoints import builtin, hub


@pytest.fixture(scope="session")
def furnished(tmp_path_factory) -> Path:
    """The files of the pages; not to be changed."""
    folder = tmp_path_factory.mktemp("furnished")
    build(folder)
    return folder


@pytest.fixture
def here(furnished, tmp_path, monkeypatch) -> Path:
    """A copy of them that is the current folder; hub and built-in model are folders of it."""
    folder = tmp_path / "here"
    shutil.copytree(furnished, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(builtin, "FOLDER", furnished / "builtin")
    monkeypatch.setattr(hub, "fetch", lambda address: furnished / "hub")
    monkeypatch.setattr(hub, "push", lambda folder, name, private=False: f"hf:{name}")
    return folder
