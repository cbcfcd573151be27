"""What the tests of the pages share: a folder with everything the pages speak of."""

import shutil
from pathlib import Path

import pytest
from sandbox import build

from vitrail.checkpoints import hub


@pytest.fixture(scope="session")
def furnished(tmp_path_factory) -> Path:
    """The files of the pages; not to be changed."""
    folder = tmp_path_factory.mktemp("furnished")
    build(folder)
    return folder


@pytest.fixture
def here(furnished, tmp_path, monkeypatch) -> Path:
    """A copy of them that is the current folder; the hub is one of its folders."""
    folder = tmp_path / "here"
    shutil.copytree(furnished, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hub, "fetch", lambda address: furnished / "hub")
    monkeypatch.setattr(hub, "push", lambda folder, name, private=False: f"hf:{name}")
    return folder
