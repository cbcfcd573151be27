"""Models on the Hugging Face hub: `hf:owner/name` or `hf:owner/name@revision`.

huggingface_hub downloads, resumes, caches and authenticates. Added here: selection of the files a
model needs, a check of the free disk space, sha256 verification of the weights (a file that fails
is deleted), use of the cache if the hub is unreachable, and one-line errors. `verified/COMMIT.json`
in a repository's cache folder records size and mtime of verified files, which are not hashed again.
"""

import glob
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from vitrail.checkpoints.files import INDEX, atomic_write, shard_names, weight_files, write_json
from vitrail.errors import CheckpointError, VitrailError
from vitrail.formatting import byte_size, comma_list

PREFIX = "hf:"
NAME, REVISION = r"(?!\.|.*/\.)[\w.-]+(/[\w.-]+)?", r"(?!.*\.\.)[\w.+-]+(/[\w.+-]+)*"
ADDRESS = re.compile(rf"hf:(?P<name>{NAME})(@(?P<revision>{REVISION}))?", re.ASCII)
SETTINGS = ("config.json", "preprocessor_config.json", "README.md")
Files = dict[str, tuple[int | None, str | None]]  # name → size, sha256 (of large files only)
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"

log = logging.getLogger(__name__)


class UnreachableError(CheckpointError):
    """The hub did not respond; a cached copy may be used instead."""


def cache_dir() -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def parse(address: str, *, destination: bool = False) -> tuple[str, str]:
    """Return the repository and the revision; the destination of a push needs no `hf:`."""
    match = ADDRESS.fullmatch(address) or (destination and ADDRESS.fullmatch(PREFIX + address))
    if not match:
        raise CheckpointError(
            f"invalid hub address {address!r}; expected hf:owner/name or hf:owner/name@revision"
        )
    if destination and match["revision"]:
        raise CheckpointError(f"cannot push to a revision ({address}); push to hf:{match['name']}")
    return match["name"], match["revision"] or "main"


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a folder to the repository `owner/name`, creating it if needed; return its address."""
    name, _ = parse(name, destination=True)
    if not folder.is_dir():
        raise CheckpointError(f"folder not found: {folder}")
    with hub_errors(name, "push to"):
        api = huggingface_hub.HfApi()
        # None: the owner's default visibility
        name = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(name).private:
            raise CheckpointError(
                f"hf:{name} already exists and is public; nothing was pushed. Make it private "
                "on the hub, or choose another name"
            )
        api.upload_folder(repo_id=name, folder_path=folder)
    return f"hf:{name}"


def fetch(address: str) -> Path:
    """Return the local folder with a repository's settings and weights, downloaded if needed."""
    name, revision = parse(address)
    folder = cache_dir() / f"models--{name.replace('/', '--')}"
    ref = folder / "refs" / revision
    try:
        with hub_errors(name, "fetch", revision):
            api, timeout = huggingface_hub.HfApi(), constants.HF_HUB_ETAG_TIMEOUT
            info = api.model_info(name, revision=revision, files_metadata=True, timeout=timeout)
            commit = str(info.sha)
            if not re.fullmatch("[0-9a-f]{40}", commit):
                raise ValueError(f"invalid commit hash {info.sha!r}")
            files: Files = {
                file.rfilename: (file.lfs.size, file.lfs.sha256) if file.lfs else (file.size, None)
                for file in info.siblings or ()
            }
    except UnreachableError as error:
        snapshot = folder / "snapshots" / (ref.read_text() if ref.is_file() else revision)
        weights = weight_files(path.name for path in snapshot.glob("*") if path.is_file())
        several = len(weights) != 1
        weights += shard_names(snapshot / INDEX) if weights == [INDEX] else []
        if several or not all((snapshot / weight).is_file() for weight in weights):
            raise CheckpointError(f"hf:{name} is not in the cache {cache_dir()}; {error}") from None
        verify(name, snapshot, dict.fromkeys(weights, (None, None)))
        if not constants.HF_HUB_OFFLINE:
            log.warning("using the cached copy: %s", error)
        return snapshot
    weights = weight_files(files)
    if len(weights) != 1:
        problem = f"no supported weights; it contains {comma_list(sorted(files)) or 'nothing'}"
        if weights:
            problem = f"{comma_list(weights)}; download one with `hf download {name} FILE`"
        raise CheckpointError(f"hf:{name} has {problem}")
    needed = [*(file for file in SETTINGS if file in files), *weights]
    snapshot = folder / "snapshots" / commit
    download(name, snapshot, {file: files[file] for file in needed})
    if weights == [INDEX]:
        shards = shard_names(snapshot / INDEX)
        if missing := [shard for shard in shards if shard not in files]:
            raise CheckpointError(f"hf:{name} lacks the shards {comma_list(missing)}")
        download(name, snapshot, {shard: files[shard] for shard in shards})
    if revision != commit and not (ref.is_file() and ref.read_text() == commit):
        with suppress(CheckpointError), atomic_write(ref) as temporary:  # for offline use
            temporary.write_text(commit)
    return snapshot


def download(name: str, snapshot: Path, files: Files) -> None:
    """Download files to the snapshot folder if they fit on the disk, and verify them."""
    needed = sum(size or 0 for file, (size, _) in files.items() if not (snapshot / file).exists())
    disk = next(parent for parent in snapshot.parents if parent.exists())
    if 0 < (free := shutil.disk_usage(disk).free) < needed:  # some file systems report 0
        raise CheckpointError(
            f"hf:{name} needs {byte_size(needed)} in {cache_dir()}, but only {byte_size(free)} "
            "are free; free some space, or set HF_HUB_CACHE to another disk"
        )
    with hub_errors(name, "fetch"):
        patterns, cache = [glob.escape(file) for file in files], cache_dir()
        huggingface_hub.snapshot_download(
            name, revision=snapshot.name, cache_dir=cache, allow_patterns=patterns
        )
    verify(name, snapshot, files)


def verify(name: str, snapshot: Path, files: Files) -> None:
    """Compare the sha256 of files that changed since the last time; delete a wrong one."""
    record = snapshot.parents[1] / "verified" / f"{snapshot.name}.json"
    before = {}
    with suppress(OSError, ValueError, TypeError):
        before = dict(json.loads(record.read_text()))
    stamps = dict(before)
    for file, (_, sha256) in files.items():
        path = snapshot / file
        status, blob = path.stat(), path.resolve()  # the cache names large files by their sha256
        sha256 = sha256 or (blob.name if re.fullmatch("[0-9a-f]{64}", blob.name) else None)
        stamps[file] = [status.st_size, status.st_mtime_ns]
        if sha256 is None or stamps[file] == before.get(file):
            continue
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != sha256.lower():
            blob.unlink()
            path.unlink(missing_ok=True)  # the link
            raise CheckpointError(
                f"corrupt download: {file} of hf:{name} (sha256 {digest[:12]}… instead of "
                f"{sha256[:12]}…) was deleted; try again"
            )
    if stamps != before:
        with suppress(CheckpointError):  # a read-only cache: verified again next time
            write_json(record, stamps)


@contextmanager
def hub_errors(name: str, action: str, revision: str = "main") -> Iterator[None]:
    """Turn all errors into one line; their types depend on library, transport and response."""
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        from huggingface_hub import errors

        if isinstance(error, errors.LocalEntryNotFoundError | RuntimeError):
            error = error.__cause__ or error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        message = f"cannot {action} hf:{name} at {constants.ENDPOINT}: {reason}"
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        if isinstance(error, errors.RepositoryNotFoundError | errors.GatedRepoError):
            message = (
                f"hf:{name} not found at {constants.ENDPOINT}, or private or gated: check the "
                f"name, request access on its page, or {LOGIN}"
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            message = f"hf:{name} has no revision {revision!r}"
        elif status in (401, 403):
            message += f"; {LOGIN}"
        network = isinstance(error, ConnectionError | TimeoutError)
        local = isinstance(error, OSError) and error.errno is not None and not network
        local |= isinstance(error, ValueError | LookupError | TypeError | AttributeError)
        if status == 429 or status >= 500 or not (status or local):
            raise UnreachableError(f"{message}; try again") from None
        raise CheckpointError(message) from None
