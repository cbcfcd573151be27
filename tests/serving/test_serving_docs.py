"""What docs/serving.md shows runs as it stands there; only the port is another."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving_helpers import encoded_image, make_state, server_port

from vitrail.serving.app import router
from vitrail.serving.limits import PUBLIC_PATHS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
HERE = "http://127.0.0.1:8000"


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def server():
    with make_state() as state, server_port(state) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def folder(tmp_path):
    for name, color in {"tulip": "red", "rose": "blue"}.items():
        (tmp_path / f"{name}.jpg").write_bytes(encoded_image(color, (60, 80), "JPEG"))
    return tmp_path


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_with_curl_run(server, folder):
    for line in blocks("sh")[0].strip().splitlines():
        words = line.replace("curl ", "curl -sS --fail-with-body ").replace(HERE, server)
        done = subprocess.run(words, shell=True, cwd=folder, capture_output=True)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert b"-o " in line.encode() or b'"engine"' in done.stdout
    assert (folder / "overlay.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("place", [0, 1])
def test_the_python_examples_run(server, folder, place):
    code = blocks("python")[place]
    if "import requests" in code:
        pytest.importorskip("requests")
    words = [sys.executable, "-c", code.replace(HERE, server)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any(color in done.stdout for color in ("red", "green", "blue"))


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_javascript_example_runs(server, folder):
    code = blocks("js")[0].replace(HERE, server) + (
        "\nconst data = require('fs').readFileSync('tulip.jpg');"
        "\nclassify(new Blob([data])).then((found) => console.log(found.guesses.length));"
    )
    done = subprocess.run(["node", "-e", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr


def test_every_route_is_told():
    for path in (
        *(route.path for route in router.routes if "POST" in route.methods),
        *PUBLIC_PATHS,
    ):
        assert f"{path}?" in PAGE or f"{path}`" in PAGE


def test_every_option_that_is_told_exists():
    help = subprocess.run(
        [sys.executable, "-m", "vitrail", "serve", "--help"], capture_output=True, text=True
    ).stdout
    told = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    foreign = {"--data-binary", "--rm", "--now"}
    for option in sorted(told - foreign):
        assert option in help


def test_what_the_image_copies_is_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in ignored
