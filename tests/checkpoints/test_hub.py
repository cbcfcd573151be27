"""The hub: fetched once, whole or not at all, and every failure one line."""

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_server import TOKEN, Hub
from huggingface_hub import constants, snapshot_download

import vitrail
from vitrail import CheckpointError
from vitrail.checkpoints.files import weight_files
from vitrail.checkpoints.hub import fetch, is_address, push

WEIGHTS = os.urandom(100_000)
CONFIG = b'{"architecture": "vit"}'
MODEL = {"config.json": CONFIG, "model.safetensors": WEIGHTS}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home" / "hub"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model hf:ada/vit; no token, no proxy, no waiting, a cache of its own."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with Hub() as hub:
        hub.add("ada/vit", MODEL)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refusal(address):
    """The line that a fetch ends with."""
    with pytest.raises(CheckpointError) as caught:
        fetch(address)
    words = str(caught.value)
    assert "\n" not in words
    return words


def leftovers(cache):
    """Files in the cache that hold weights, or a part of them."""
    return [p for p in cache.rglob("*") if p.is_file() and p.stat().st_size > 10_000]


@pytest.mark.parametrize("address", ["hf:ada/vit", "hf:ada/vit@v1.0", "hf:vit", "hf:"])
def test_addresses_begin_with_hf(address):
    assert is_address(address)
    assert not is_address(f"./{address}")
    assert not is_address("ViT-B/16")


@pytest.mark.parametrize(
    "address",
    [
        *("hf:", "hf://ada/vit", "hf:a/b/c", "hf:ada/vit@", "hf:ada/vit@../../x", "hf:a b"),
        *("hf:..", "hf:ada/..", "hf:ada/.vit", "hf:./vit"),
    ],
)
def test_what_is_no_address_is_told_how_to_write_one(hub, address):
    assert "hf:owner/name@revision" in refusal(address)
    assert hub.requests == []


def test_a_name_no_hub_allows_is_one_line(hub):
    assert "--" in refusal("hf:ada/a--b")


def test_importing_this_does_not_import_the_library():
    code = "import sys, vitrail.checkpoints.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_model_is_downloaded_once(hub, cache):
    folder = fetch("hf:ada/vit")
    assert contents(folder) == MODEL
    assert folder.is_relative_to(cache)
    assert hub.count("GET .*(storage|resolve)") == 2
    hub.requests.clear()
    assert fetch("hf:ada/vit") == folder
    assert hub.requests == ["GET /api/models/ada/vit/revision/main"]


def test_checked_weights_are_not_read_again(hub, monkeypatch):
    folder = fetch("hf:ada/vit")
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert fetch("hf:ada/vit") == folder


def test_weights_changed_behind_our_back_are_noticed(hub):
    weights = fetch("hf:ada/vit") / "model.safetensors"
    weights.resolve().write_bytes(WEIGHTS[::-1])
    assert "corrupt download" in refusal("hf:ada/vit")
    assert contents(fetch("hf:ada/vit")) == MODEL


def test_a_new_commit_is_fetched(hub):
    old = fetch("hf:ada/vit")
    hub.repositories["ada/vit"].commit({**MODEL, "model.safetensors": b"better"})
    assert (fetch("hf:ada/vit") / "model.safetensors").read_bytes() == b"better"
    assert contents(old) == MODEL


def test_a_revision_is_a_branch_or_a_commit(hub):
    repository = hub.repositories["ada/vit"]
    first = repository.branches["main"]
    repository.commit({"model.safetensors": b"pull request"}, "refs/pr/1")
    repository.commit({"model.safetensors": b"second"})
    assert contents(fetch(f"hf:ada/vit@{first}")) == MODEL
    assert contents(fetch("hf:ada/vit@refs/pr/1")) == {"model.safetensors": b"pull request"}
    assert contents(fetch("hf:ada/vit")) == {"model.safetensors": b"second"}
    assert refusal("hf:ada/vit@v9") == "hf:ada/vit has no revision 'v9'"


@pytest.mark.parametrize("revision", ["", "@main", "@refs/pr/1", "@commit"])
def test_offline_a_warm_cache_is_enough(hub, monkeypatch, revision):
    commit = hub.repositories["ada/vit"].commit(MODEL, "refs/pr/1")
    address = "hf:ada/vit" + revision.replace("commit", commit)
    folder = fetch(address)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(address) == folder
    assert contents(folder) == MODEL
    assert hub.requests == []


def test_offline_a_cold_cache_is_one_line(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert re.search("hf:ada/vit is not in the cache .*HF_HUB_OFFLINE", refusal("hf:ada/vit"))
    assert hub.requests == []


def test_offline_half_a_model_is_none(hub, monkeypatch):
    (fetch("hf:ada/vit") / "model.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the cache" in refusal("hf:ada/vit")


@pytest.mark.parametrize("damage", [False, True])
def test_offline_the_cache_another_program_filled_serves(hub, cache, monkeypatch, damage):
    folder = snapshot_download("ada/vit", cache_dir=cache, endpoint=hub.url)
    if damage:
        next(cache.glob("*/snapshots/*/model.safetensors")).resolve().write_bytes(b"rust")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if damage:
        assert "corrupt download" in refusal("hf:ada/vit")
        assert "not in the cache" in refusal("hf:ada/vit")
    else:
        assert str(fetch("hf:ada/vit")) == folder


def test_what_another_program_left_out_is_fetched_later(hub, cache, monkeypatch):
    snapshot_download("ada/vit", cache_dir=cache, endpoint=hub.url, allow_patterns="model.*")
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert contents(fetch("hf:ada/vit")).keys() == {"model.safetensors"}
    assert contents(fetch("hf:ada/vit")) == MODEL


@pytest.mark.parametrize("trouble", ["refused", "busy"])
def test_a_hub_out_of_reach_leaves_the_cache(hub, monkeypatch, caplog, trouble):
    folder = fetch("hf:ada/vit")
    if trouble == "refused":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    else:
        hub.status = 503
    assert fetch("hf:ada/vit") == folder
    assert "using the cached copy" in caplog.text
    assert {"refused": "ConnectError", "busy": "503"}[trouble] in refusal("hf:ada/other")


def test_a_broken_connection_is_taken_up_where_it_broke(hub):
    hub.break_after["model.safetensors"] = [40_000, 30_000]
    assert contents(fetch("hf:ada/vit")) == MODEL
    assert hub.count("GET /storage") == 3


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_stays_broken_is_one_line_and_leaves_nothing(hub, cache, reset):
    hub.reset = reset
    hub.break_after["model.safetensors"] = [40_000] + [0] * 20
    assert re.match("cannot fetch hf:ada/vit at http.*; try again$", refusal("hf:ada/vit"))
    assert leftovers(cache) == []
    hub.break_after.clear()
    assert contents(fetch("hf:ada/vit")) == MODEL


@pytest.mark.parametrize("links", [True, False])
def test_a_wrong_checksum_is_one_line_and_leaves_nothing(hub, cache, monkeypatch, links):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", not links)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS_WARNING", True)
    hub.damaged.add("model.safetensors")
    words = refusal("hf:ada/vit")
    assert re.match(r"corrupt download: model.safetensors of hf:ada/vit \(sha256 .*deleted", words)
    assert leftovers(cache) == []
    hub.damaged.clear()
    assert contents(fetch("hf:ada/vit")) == MODEL


def test_a_full_disk_is_told_before_the_download(hub, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000))
    assert "needs 98 KiB" in refusal("hf:ada/vit")
    assert hub.count("storage|resolve") == 0


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/nowhere"),
            "Permission denied: '/nowhere'",
        ),
        (RuntimeError("Data processing error:\n  CAS service"), "Data processing error: CAS"),
    ],
)
def test_trouble_of_this_machine_is_one_line(hub, monkeypatch, trouble, words):
    def download(*_, **__):
        raise trouble

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert words in refusal("hf:ada/vit")


def test_a_cache_that_may_not_be_written_still_serves(hub, cache, monkeypatch):
    folder = fetch("hf:ada/vit")
    shutil.rmtree(folder.parents[1] / "verified")
    (folder.parents[1] / "verified").touch()  # in the way, also of a user who may do anything
    assert fetch("hf:ada/vit") == folder


@pytest.mark.parametrize("token", [None, "hf_wrong"])
@pytest.mark.parametrize("name", ["ada/missing", "ada/private", "missing"])
def test_a_missing_or_private_repository_is_one_line(hub, monkeypatch, name, token):
    hub.add("ada/private", MODEL, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    words = refusal(f"hf:{name}")
    assert re.match(f"hf:{name} not found at .*`hf auth login`, or set HF_TOKEN$", words)


@pytest.mark.parametrize("trait", ["private", "gated"])
def test_the_token_that_the_library_knows_opens(hub, monkeypatch, trait):
    hub.add("ada/closed", MODEL, **{trait: True})
    assert "HF_TOKEN" in refusal("hf:ada/closed")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert contents(fetch("hf:ada/closed")) == MODEL
    assert not hub.leaked_token


def test_what_no_model_needs_is_left_there(hub):
    needed = {**MODEL, "preprocessor_config.json": b"{}", "README.md": b"# ViT"}
    others = ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx"]
    others += ["checkpoint-1/model.safetensors", "training_args.bin", "logs.txt"]
    hub.add("ada/large", {**needed, **dict.fromkeys(others, b"huge")})
    assert contents(fetch("hf:ada/large")) == needed
    assert hub.count("|".join(others)) == 0


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "other.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin", "ViT-B_16.npz"], ["pytorch_model.bin"]),
        (["ViT-B_16.npz"], ["ViT-B_16.npz"]),
        (["vit.pth", "README.md"], ["vit.pth"]),
        (["dino.safetensors", "dino.pth"], ["dino.safetensors"]),
        (["b.npz", "a.npz"], ["a.npz", "b.npz"]),
        (["onnx/model.onnx", "sub/model.safetensors", "tf_model.h5"], []),
    ],
)
def test_the_safest_weights_are_chosen(names, chosen):
    assert weight_files(names) == chosen


def test_a_lone_npz_is_a_model(hub):
    hub.add("ada/npz", {"ViT-B_16.npz": WEIGHTS})
    assert contents(fetch("hf:ada/npz")) == {"ViT-B_16.npz": WEIGHTS}


def test_a_repository_without_weights_says_what_it_has(hub):
    hub.add("ada/empty", {"config.json": CONFIG, "tf_model.h5": b""})
    assert refusal("hf:ada/empty").endswith("it contains config.json, tf_model.h5")
    hub.add("ada/many", {f"{number}.txt": b"" for number in range(100)})
    assert refusal("hf:ada/many").endswith("and 95 more")


def test_several_weights_are_not_chosen_among(hub):
    hub.add("ada/zoo", {"B_16.npz": b"", "L_16.npz": b""})
    assert "B_16.npz, L_16.npz; download one with `hf download" in refusal("hf:ada/zoo")


INDEX = b'{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'
SHARDED = {
    "model-1-of-2.safetensors": WEIGHTS,
    "model-2-of-2.safetensors": WEIGHTS[::-1],
    "model.safetensors.index.json": INDEX,
}


def test_all_shards_are_fetched(hub, monkeypatch):
    hub.add("ada/giant", {**SHARDED, "model-3-of-3.safetensors": b"of an older index"})
    folder = fetch("hf:ada/giant")
    assert contents(folder) == SHARDED
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("hf:ada/giant") == folder
    (folder / "model-2-of-2.safetensors").unlink()
    assert "not in the cache" in refusal("hf:ada/giant")


def test_what_arrived_of_the_shards_is_kept_but_not_used(hub, monkeypatch):
    hub.add("ada/giant", SHARDED)
    hub.reset = True
    hub.break_after["model-2-of-2.safetensors"] = [10]
    assert "try again" in refusal("hf:ada/giant")
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert "not in the cache" in refusal("hf:ada/giant")
    hub.requests.clear()
    assert contents(fetch("hf:ada/giant")) == SHARDED
    assert hub.count("GET /storage/.*/model-1-of-2.safetensors") == 0


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": {"a": 1}}'])
def test_an_index_of_nothing_is_one_line(hub, index):
    hub.add("ada/giant", {**SHARDED, "model.safetensors.index.json": index})
    assert "model.safetensors.index.json" in refusal("hf:ada/giant")


def test_a_missing_shard_is_named(hub):
    hub.add("ada/giant", {k: v for k, v in SHARDED.items() if "2-of" not in k})
    assert "lacks the shards model-2-of-2.safetensors" in refusal("hf:ada/giant")


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "README.md").write_bytes(b"# Ours")
    (folder / "model.safetensors").write_bytes(WEIGHTS[::-1])
    return folder


@pytest.mark.parametrize("name", ["ada/new", "ada/vit", "hf:ada/new", "new"])
def test_what_is_pushed_is_what_is_fetched(hub, monkeypatch, bundle, name):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("hub_server.LARGE", ())
    address = push(bundle, name)
    assert address == {"new": "hf:me/new"}.get(name, f"hf:{name.removeprefix('hf:')}")
    assert contents(fetch(address)) == contents(bundle)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own
def test_weights_are_pushed_to_the_large_file_storage(hub, monkeypatch, bundle):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which the server here is not
    push(bundle, "ada/new")
    assert hub.count("PUT /storage") == 1
    assert contents(fetch("hf:ada/new")) == contents(bundle)


def test_a_private_push_never_goes_public(hub, monkeypatch, bundle):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("hub_server.LARGE", ())
    for _ in range(2):
        push(bundle, "ada/secret", private=True)
    assert hub.repositories["ada/secret"].private
    with pytest.raises(CheckpointError, match="is public; nothing was pushed"):
        push(bundle, "ada/vit", private=True)
    assert len(hub.repositories["ada/vit"].commits) == 1


@pytest.mark.parametrize("name", ["ada/..", "..", "ada/new/more", "ada/new@v1", "ada/"])
def test_a_push_to_a_wrong_name_writes_nothing(monkeypatch, name):
    monkeypatch.setattr("vitrail.checkpoints.save.save_bundle", pytest.fail)
    with pytest.raises(CheckpointError, match=r"hf:owner/name|push to hf:ada/new"):
        vitrail.push(vitrail.create("ViT-Mu/4"), name)


def test_a_push_that_cannot_be_is_one_line(hub, monkeypatch, bundle):
    with pytest.raises(CheckpointError, match=r"401.*`hf auth login`, or set HF_TOKEN$"):
        push(bundle, "ada/new")
    with pytest.raises(CheckpointError, match="folder not found"):
        push(bundle / "bundel", "ada/new")
    with pytest.raises(CheckpointError, match="push to hf:ada/new"):
        push(bundle, "ada/new@v1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        push(bundle, "ada/new")
