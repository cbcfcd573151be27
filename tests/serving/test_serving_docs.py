"""The examples of docs/serving.md run as written, with another port."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving_helpers import encoded_image

from vitrail.serving.app import ROUTES
from vitrail.serving.limits import PUBLIC_PATHS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
HERE = "http://127.0.0.1:8000"


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def server(port):
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def folder(tmp_path):
    for name, color in {"tulip": "red", "rose": "blue"}.items():
        (tmp_path / f"{name}.jpg").write_bytes(encoded_image(color, (60, 80), "JPEG"))
    return tmp_path


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_commands_run(server, folder):
    for line in blocks("sh")[0].strip().splitlines():
        command = line.replace("curl ", "curl -sS --fail-with-body ").replace(HERE, server)
        result = subprocess.run(command, shell=True, cwd=folder, capture_output=True)
        assert result.returncode == 0, (line, result.stdout, result.stderr)
        assert b"-o " in line.encode() or b'"engine"' in result.stdout
    assert (folder / "overlay.png").read_bytes().startswith(b"\x89PNG")


def test_python_example_runs(server, folder):
    (code,) = blocks("python")
    command = [sys.executable, "-c", code.replace(HERE, server)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert any(color in result.stdout for color in ("red", "green", "blue"))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_javascript_example_runs(server, folder):
    code = blocks("js")[0].replace(HERE, server) + (
        "\nconst data = require('fs').readFileSync('tulip.jpg');"
        "\nclassify(new Blob([data])).then((found) => console.log(found.guesses.length));"
    )
    result = subprocess.run(["node", "-e", code], cwd=folder, capture_output=True, text=True)
    assert result.stdout == "3\n", result.stderr


def test_every_route_is_documented():
    for path in (*(route.path for route in ROUTES if "POST" in route.methods), *PUBLIC_PATHS):
        assert f"{path}?" in PAGE or f"{path}`" in PAGE


def test_docker_copies_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in ignored
