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
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vitrail.checkpoints.files import INDEX, atomic_write, shard_names, weight_files, write_json
from vitrail.errors import CheckpointError, VitrailError
from vitrail.formatting import byte_size, comma_list

ADDRESS = re.compile(
    r"hf:(?P<name>(?!\.|.*/\.)[\w.-]+(/[\w.-]+)?)"
    r"(@(?P<revision>(?!.*\.\.)[\w.+-]+(/[\w.+-]+)*))?",
    re.ASCII,
)
SETTINGS = ("config.json", "preprocessor_config.json", "README.md")
Files = dict[str, tuple[int | None, str | None]]  # name → size, sha256 (of large files only)
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"

log = logging.getLogger(__name__)


class UnreachableError(CheckpointError):
    """The hub did not respond; a cached copy may be used instead."""


class Repository(NamedTuple):
    """A repository at a revision, and its folder in the cache."""

    name: str
    revision: str
    endpoint: str
    folder: Path


def is_address(reference: str) -> bool:
    return reference.startswith("hf:")


def cache_dir() -> Path:
    """Return huggingface_hub's cache; the environment is read at every call."""
    from huggingface_hub import constants

    cache, home = os.environ.get("HF_HUB_CACHE"), os.environ.get("HF_HOME")
    cache = cache or (os.path.join(home, "hub") if home else constants.HF_HUB_CACHE)
    return Path(os.path.expandvars(cache)).expanduser().resolve()


def is_offline() -> bool:
    from huggingface_hub import constants

    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return constants.HF_HUB_OFFLINE or value.upper() in constants.ENV_VARS_TRUE_VALUES


def parse(address: str) -> Repository:
    from huggingface_hub import constants

    match = ADDRESS.fullmatch(address)
    if match is None:
        raise CheckpointError(
            f"invalid hub address {address!r}; expected hf:owner/name or hf:owner/name@revision"
        )
    folder = cache_dir() / f"models--{match['name'].replace('/', '--')}"
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    return Repository(match["name"], match["revision"] or "main", endpoint, folder)


def parse_destination(name: str) -> Repository:
    """Parse the target of a push: `owner/name`, with or without `hf:`."""
    repo = parse(name if is_address(name) else f"hf:{name}")
    if repo.revision != "main":
        raise CheckpointError(f"cannot push to a revision ({name}); push to hf:{repo.name}")
    return repo


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a folder to the repository `owner/name`, creating it if needed; return its address."""
    repo = parse_destination(name)
    if not folder.is_dir():
        raise CheckpointError(f"folder not found: {folder}")
    if is_offline():
        raise CheckpointError(f"cannot push to hf:{repo.name}: HF_HUB_OFFLINE is set")
    with hub_errors(repo, "push to"):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=repo.endpoint)
        # private=None: the owner's default visibility
        repo_id = api.create_repo(repo.name, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repo_id).private:
            raise CheckpointError(
                f"hf:{repo_id} already exists and is public; nothing was pushed. Make it private "
                "on the hub, or choose another name"
            )
        api.upload_folder(repo_id=repo_id, folder_path=folder)
    return f"hf:{repo_id}"


def fetch(address: str) -> Path:
    """Return the local folder with a repository's settings and weights, downloaded if needed."""
    repo = parse(address)
    try:
        commit, files = list_files(repo)
    except UnreachableError as error:
        if (cached := find_cached(repo)) is None:
            raise
        if not is_offline():
            log.warning("using the cached copy: %s", error)
        return cached
    weights = weight_files(files)
    if len(weights) != 1:
        several = f"several weights files: {comma_list(weights)}; download one with"
        none = f"no supported weights; it contains {comma_list(sorted(files)) or 'nothing'}"
        problem = f"{several} `hf download {repo.name} FILE`" if weights else none
        raise CheckpointError(f"hf:{repo.name} has {problem}")
    settings = [name for name in SETTINGS if name in files]
    snapshot = download(repo, commit, {name: files[name] for name in [*settings, *weights]})
    if weights == [INDEX]:
        shards = shard_names(snapshot / INDEX)
        if missing := [name for name in shards if name not in files]:
            raise CheckpointError(f"hf:{repo.name} lacks the shards {comma_list(missing)}")
        download(repo, commit, {name: files[name] for name in shards})
    ref = repo.folder / "refs" / repo.revision  # for offline use
    if repo.revision != commit and not (ref.is_file() and ref.read_text() == commit):
        with suppress(CheckpointError), atomic_write(ref) as temporary:
            temporary.write_text(commit)
    return snapshot


def list_files(repo: Repository) -> tuple[str, Files]:
    """Return the commit of the revision and its files."""
    if is_offline():
        raise UnreachableError(
            f"hf:{repo.name} is not in the cache {repo.folder.parent}, and HF_HUB_OFFLINE is set; "
            "unset it, or fetch the model once while online"
        )
    with hub_errors(repo, "fetch"):
        from huggingface_hub import HfApi, constants

        timeout = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi(endpoint=repo.endpoint).model_info(
            repo.name, revision=repo.revision, files_metadata=True, timeout=timeout
        )
        if not re.fullmatch("[0-9a-f]{40}", info.sha or ""):
            raise ValueError(f"invalid commit hash {info.sha!r}")
        return str(info.sha), {
            str(file.rfilename): (file.lfs.size, file.lfs.sha256) if file.lfs else (file.size, None)
            for file in info.siblings or ()
        }


def download(repo: Repository, commit: str, files: Files) -> Path:
    """Download and verify files if they fit on the disk; return the snapshot folder."""
    snapshot, disk = repo.folder / "snapshots" / commit, repo.folder
    needed = sum(size or 0 for name, (size, _) in files.items() if not (snapshot / name).exists())
    while not disk.exists():
        disk = disk.parent
    if 0 < (free := shutil.disk_usage(disk).free) < needed:  # some file systems report 0
        raise CheckpointError(
            f"hf:{repo.name} needs {byte_size(needed)} in {repo.folder.parent}, but only "
            f"{byte_size(free)} are free; free some space, or set HF_HUB_CACHE to another disk"
        )
    with hub_errors(repo, "fetch"):
        from huggingface_hub import snapshot_download

        snapshot_download(
            repo.name,
            revision=commit,
            endpoint=repo.endpoint,
            cache_dir=repo.folder.parent,
            allow_patterns=[glob.escape(name) for name in files],
        )
    verify(repo, snapshot, files)
    return snapshot


def find_cached(repo: Repository) -> Path | None:
    """Return the cached snapshot of the revision if its weights are complete and intact."""
    ref = repo.folder / "refs" / repo.revision
    snapshot = repo.folder / "snapshots" / (ref.read_text() if ref.is_file() else repo.revision)
    names = weight_files(path.name for path in snapshot.glob("*") if path.is_file())
    if names == [INDEX]:
        names += shard_names(snapshot / INDEX)
    elif len(names) != 1:
        return None
    if not all((snapshot / name).is_file() for name in names):
        return None
    verify(repo, snapshot, dict.fromkeys(names, (None, None)))
    return snapshot


def verify(repo: Repository, snapshot: Path, files: Files) -> None:
    """Compare size and sha256 of files that changed since the last time; delete a wrong one."""
    record = repo.folder / "verified" / f"{snapshot.name}.json"
    try:
        before = dict(json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        before = {}
    stamps = dict(before)
    for name, (size, sha256) in files.items():
        path = snapshot / name
        status, blob = path.stat(), path.resolve()  # the cache names large files by their sha256
        stamps[name] = [status.st_size, status.st_mtime_ns]
        if stamps[name] == before.get(name):
            continue
        sha256 = sha256 or (blob.name if re.fullmatch("[0-9a-f]{64}", blob.name) else None)
        problem = ""
        if size is not None and status.st_size != size:
            problem = f"{status.st_size} bytes instead of {size}"
        elif sha256 is not None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != sha256.lower():
                problem = f"sha256 {digest[:12]}… instead of {sha256[:12]}…"
        if problem:
            blob.unlink()
            path.unlink(missing_ok=True)  # the link
            raise CheckpointError(
                f"corrupt download: {name} of hf:{repo.name} ({problem}) was deleted; try again"
            )
    if stamps != before:
        with suppress(CheckpointError):  # a read-only cache: verified again next time
            write_json(record, stamps)


@contextmanager
def hub_errors(repo: Repository, action: str) -> Iterator[None]:
    """Turn whatever a hub, a network or a disk makes huggingface_hub raise into one line.

    The exception types depend on its version, transport and the response, so all are caught; only
    calls to it and the parsing of its answers may be inside.
    """
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        from huggingface_hub import errors

        if isinstance(error, errors.LocalEntryNotFoundError | RuntimeError):
            error = error.__cause__ or error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        message = f"cannot {action} hf:{repo.name} at {repo.endpoint}: {reason}"
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        if isinstance(error, errors.RepositoryNotFoundError | errors.GatedRepoError):
            message = (
                f"hf:{repo.name} not found at {repo.endpoint}, or private or gated: check the "
                f"name, request access on its page, or {LOGIN}"
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            message = f"hf:{repo.name} has no revision {repo.revision!r}"
        elif status in (401, 403):
            message += f"; {LOGIN}"
        network = isinstance(error, ConnectionError | TimeoutError)
        local = isinstance(error, OSError) and error.errno is not None and not network
        bugs = ValueError | LookupError | TypeError | AttributeError | AssertionError
        if status == 429 or status >= 500 or not (status or local or isinstance(error, bugs)):
            raise UnreachableError(f"{message}; try again") from None
        raise CheckpointError(message) from None
