"""The hub client: caching, verification, offline use, one-line errors."""

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_server import TOKEN, Hub
from huggingface_hub import constants, snapshot_download

import vitrail
from vitrail import CheckpointError
from vitrail.checkpoints.files import weight_files
from vitrail.checkpoints.hub import fetch, push

pytestmark = pytest.mark.slow

WEIGHTS = os.urandom(100_000)
CONFIG = b'{"architecture": "vit"}'
MODEL = {"config.json": CONFIG, "model.safetensors": WEIGHTS}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home" / "hub"


@pytest.fixture
def hub(tmp_path, cache, monkeypatch):
    """A local hub with the model hf:ada/vit; no token, proxy or retries, an empty cache."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with Hub() as hub:
        hub.add("ada/vit", MODEL)
        for name, value in {
            "HF_HUB_CACHE": str(cache),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(constants, name, value)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def offline(hub, monkeypatch):
    @contextmanager
    def offline():
        hub.requests.clear()
        with monkeypatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
            yield
        assert hub.requests == []

    return offline


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def error_of(address):
    with pytest.raises(CheckpointError) as caught:
        fetch(address)
    message = str(caught.value)
    assert "\n" not in message
    return message


def leftovers(cache):
    """Cached files that contain weights or parts of them."""
    return [p for p in cache.rglob("*") if p.is_file() and p.stat().st_size > 10_000]


def test_invalid_address_raises(hub):
    for address in ("hf:", "hf://ada/vit", "hf:ada/vit@../../x", "hf:./vit"):
        assert "hf:owner/name@revision" in error_of(address)
    assert "--" in error_of("hf:ada/a--b")  # rejected by huggingface_hub
    assert hub.requests == []


def test_huggingface_hub_is_imported_lazily():
    code = "import sys, vitrail.checkpoints.hub; sys.exit('huggingface_hub.hf_api' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_second_fetch_uses_the_cache(hub, cache, monkeypatch):
    folder = fetch("hf:ada/vit")
    assert contents(folder) == MODEL
    assert folder.is_relative_to(cache)
    assert hub.count("GET .*(storage|resolve)") == 2
    hub.requests.clear()
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("hashed again"))
    assert fetch("hf:ada/vit") == folder
    assert hub.requests == ["GET /api/models/ada/vit/revision/main"]


def test_modified_cache_is_detected_and_a_read_only_one_used(hub):
    weights = fetch("hf:ada/vit") / "model.safetensors"
    weights.resolve().write_bytes(WEIGHTS[::-1])
    assert "corrupt download" in error_of("hf:ada/vit")
    assert contents(fetch("hf:ada/vit")) == MODEL
    folder = fetch("hf:ada/vit")
    shutil.rmtree(folder.parents[1] / "verified")
    (folder.parents[1] / "verified").touch()  # in the way, also of a user who may do anything
    assert fetch("hf:ada/vit") == folder


def test_revisions(hub):
    repository = hub.repositories["ada/vit"]
    first, old = repository.branches["main"], fetch("hf:ada/vit")
    repository.commit({"model.safetensors": b"pull request"}, "refs/pr/1")
    repository.commit({"model.safetensors": b"second"})
    assert contents(fetch(f"hf:ada/vit@{first}")) == MODEL
    assert contents(fetch("hf:ada/vit@refs/pr/1")) == {"model.safetensors": b"pull request"}
    assert contents(fetch("hf:ada/vit")) == {"model.safetensors": b"second"}
    assert contents(old) == MODEL
    assert error_of("hf:ada/vit@v9") == "hf:ada/vit has no revision 'v9'"


@pytest.mark.parametrize("revision", ["", "@main", "@refs/pr/1", "@commit"])
def test_offline_uses_the_cache(hub, offline, revision):
    commit = hub.repositories["ada/vit"].commit(MODEL, "refs/pr/1")
    address = "hf:ada/vit" + revision.replace("commit", commit)
    folder = fetch(address)
    with offline():
        assert fetch(address) == folder
        assert contents(folder) == MODEL
        (folder / "model.safetensors").unlink()
        assert re.search("hf:ada/vit is not in the cache .*HF_HUB_OFFLINE", error_of(address))


def test_cache_filled_by_huggingface_hub_is_checked_offline_and_completed(hub, cache, offline):
    fill = {"cache_dir": cache, "endpoint": hub.url}
    snapshot_download("ada/vit", allow_patterns="model.*", **fill)
    with offline():
        assert contents(fetch("hf:ada/vit")).keys() == {"model.safetensors"}
    assert contents(fetch("hf:ada/vit")) == MODEL
    shutil.rmtree(cache)
    folder = snapshot_download("ada/vit", **fill)
    with offline():
        assert str(fetch("hf:ada/vit")) == folder
        shutil.rmtree(cache / "models--ada--vit" / "verified")
        next(cache.glob("*/snapshots/*/model.safetensors")).resolve().write_bytes(b"rust")
        assert "corrupt download" in error_of("hf:ada/vit")
        assert "not in the cache" in error_of("hf:ada/vit")


@pytest.mark.parametrize("trouble", ["refused", "busy"])
def test_unreachable_hub_falls_back_to_the_cache(hub, monkeypatch, caplog, trouble):
    folder = fetch("hf:ada/vit")
    if trouble == "refused":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    else:
        hub.status = 503
    assert fetch("hf:ada/vit") == folder
    assert "using the cached copy" in caplog.text
    assert {"refused": "ConnectError", "busy": "503"}[trouble] in error_of("hf:ada/other")


@pytest.mark.parametrize("reset", [False, True])
def test_interrupted_download_resumes_or_leaves_nothing(hub, cache, reset):
    hub.reset = reset
    hub.break_after["model.safetensors"] = [40_000] + [0] * 20
    assert re.match("cannot fetch hf:ada/vit at http.*; try again$", error_of("hf:ada/vit"))
    assert leftovers(cache) == []
    hub.reset, hub.break_after["model.safetensors"] = False, [40_000, 30_000]
    hub.requests.clear()
    assert contents(fetch("hf:ada/vit")) == MODEL
    assert hub.count("GET /storage") == 3


@pytest.mark.parametrize("links", [True, False])
def test_wrong_checksum_raises_and_leaves_nothing(hub, cache, monkeypatch, links):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", not links)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    hub.damaged.add("model.safetensors")
    expected = r"corrupt download: model.safetensors of hf:ada/vit \(sha256 .*deleted"
    assert re.match(expected, error_of("hf:ada/vit"))
    assert leftovers(cache) == []
    hub.damaged.clear()
    assert contents(fetch("hf:ada/vit")) == MODEL


def test_full_disk_raises_before_the_download(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000))
    assert "needs 98 KiB" in error_of("hf:ada/vit")
    assert hub.count("storage|resolve") == 0


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Denied", "/nowhere"), "Denied: '/nowhere'"),
        (RuntimeError("Data processing error:\n  CAS service"), "Data processing error: CAS"),
    ],
)
def test_local_errors_are_one_line(hub, monkeypatch, trouble, message):
    def download(*_, **__):
        raise trouble

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert message in error_of("hf:ada/vit")


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_missing_or_private_repository_raises(hub, monkeypatch, token):
    hub.add("ada/private", MODEL, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for name in ("ada/missing", "ada/private", "missing"):
        expected = f"hf:{name} not found at .*`hf auth login`, or set HF_TOKEN$"
        assert re.match(expected, error_of(f"hf:{name}"))


@pytest.mark.parametrize("trait", ["private", "gated"])
def test_token_is_used_and_not_leaked(hub, monkeypatch, trait):
    hub.add("ada/closed", MODEL, **{trait: True})
    assert "HF_TOKEN" in error_of("hf:ada/closed")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert contents(fetch("hf:ada/closed")) == MODEL
    assert not hub.leaked_token


def test_weight_file_preference():
    for names, chosen in [
        (["model.safetensors", "pytorch_model.bin", "other.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin", "ViT-B_16.npz"], ["pytorch_model.bin"]),
        (["vit.pth", "README.md"], ["vit.pth"]),
        (["dino.safetensors", "dino.pth"], ["dino.safetensors"]),
        (["b.npz", "a.npz"], ["a.npz", "b.npz"]),
        (["onnx/model.onnx", "sub/model.safetensors", "tf_model.h5"], []),
    ]:
        assert weight_files(names) == chosen


def test_only_needed_files_are_downloaded_and_ambiguous_ones_raise(hub):
    hub.add("ada/empty", {"config.json": CONFIG, "tf_model.h5": b""})
    assert error_of("hf:ada/empty").endswith("it contains config.json, tf_model.h5")
    hub.add("ada/many", {f"{number}.txt": b"" for number in range(100)})
    assert error_of("hf:ada/many").endswith("and 95 more")
    hub.add("ada/zoo", {"B_16.npz": b"", "L_16.npz": b""})
    assert "B_16.npz, L_16.npz; download one with `hf download" in error_of("hf:ada/zoo")
    needed = {**MODEL, "preprocessor_config.json": b"{}", "README.md": b"# ViT"}
    others = ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx"]
    others += ["checkpoint-1/model.safetensors", "training_args.bin", "logs.txt"]
    hub.add("ada/large", {**needed, **dict.fromkeys(others, b"huge")})
    assert contents(fetch("hf:ada/large")) == needed
    assert hub.count("|".join(others)) == 0


INDEX = b'{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'
SHARDED = {
    "model-1-of-2.safetensors": WEIGHTS,
    "model-2-of-2.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": INDEX,
}


def test_all_shards_are_fetched(hub, offline):
    hub.add("ada/giant", {**SHARDED, "model-3-of-3.safetensors": b"of an older index"})
    folder = fetch("hf:ada/giant")
    assert contents(folder) == SHARDED
    with offline():
        assert fetch("hf:ada/giant") == folder
        (folder / "model-2-of-2.safetensors").unlink()
        assert "not in the cache" in error_of("hf:ada/giant")


def test_incomplete_shards_are_kept_but_not_used(hub, offline):
    hub.add("ada/giant", SHARDED)
    hub.reset = True
    hub.break_after["model-2-of-2.safetensors"] = [10]
    assert "try again" in error_of("hf:ada/giant")
    with offline():
        assert "not in the cache" in error_of("hf:ada/giant")
    assert contents(fetch("hf:ada/giant")) == SHARDED
    assert hub.count("GET /storage/.*/model-1-of-2.safetensors") == 0


def test_invalid_shards_raise(hub):
    for index in (b"{", b"[]", b"{}", b'{"weight_map": {"a": 1}}'):
        hub.add("ada/giant", {**SHARDED, "model.safetensors.index.json": index, "x": index})
        assert "model.safetensors.index.json" in error_of("hf:ada/giant")
    hub.add("ada/lost", {k: v for k, v in SHARDED.items() if "2-of" not in k})
    assert "lacks the shards model-2-of-2.safetensors" in error_of("hf:ada/lost")


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name, content in {**MODEL, "README.md": b"# Ours"}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own
@pytest.mark.parametrize("name", ["ada/new", "ada/vit", "hf:ada/new", "new", "ada/large"])
def test_push_then_fetch(hub, monkeypatch, bundle, name):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which the server here is not
    if name != "ada/large":
        monkeypatch.setattr("hub_server.LARGE", ())
    address = push(bundle, name)
    assert address == {"new": "hf:me/new"}.get(name, f"hf:{name.removeprefix('hf:')}")
    assert contents(fetch(address)) == contents(bundle)
    assert hub.count("PUT /storage") == (name == "ada/large")  # as a large file


def test_private_push_never_goes_public(hub, monkeypatch, bundle):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("hub_server.LARGE", ())
    for _ in range(2):
        push(bundle, "ada/secret", private=True)
    assert hub.repositories["ada/secret"].private
    with pytest.raises(CheckpointError, match="is public; nothing was pushed"):
        push(bundle, "ada/vit", private=True)
    assert len(hub.repositories["ada/vit"].commits) == 1


@pytest.mark.parametrize("name", ["ada/..", "..", "ada/new/more", "ada/new@v1", "ada/"])
def test_push_to_an_invalid_name_writes_nothing(monkeypatch, name):
    monkeypatch.setattr("vitrail.checkpoints.bundle.save_bundle", pytest.fail)
    with pytest.raises(CheckpointError, match=r"hf:owner/name|push to hf:ada/new"):
        vitrail.push(vitrail.create("ViT-Mu/4"), name)


def test_failed_push_is_one_line(hub, offline, bundle):
    with pytest.raises(CheckpointError, match=r"401.*`hf auth login`, or set HF_TOKEN$"):
        push(bundle, "ada/new")
    with pytest.raises(CheckpointError, match="folder not found"):
        push(bundle / "bundel", "ada/new")
    with offline(), pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        push(bundle, "ada/new")
