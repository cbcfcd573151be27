"""Models on a Hugging Face hub: `hf:owner/name`, or `hf:owner/name@revision`.

huggingface_hub downloads, keeps the cache and knows the tokens. Here it is decided which files a
model needs, and no file of weights is believed before it has the size and the sha256 that the
server tells. One that has not is deleted, so that the next try downloads it again.

The cache has the layout that huggingface_hub documents; `checked` is ours:

    models--owner--name/
        refs/main               the commit that a revision was, when it was last asked for
        snapshots/COMMIT/       the folder that `fetch` returns: links into blobs/
        blobs/SHA256            files; a large one is named after its contents
        checked/COMMIT.json     size and time of each file that was found to be right
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitrail.checkpoints.files import read_json, whole_or_absent, write_json
from vitrail.errors import CheckpointError, VitrailError
from vitrail.words import listed, size

PREFIX = "hf:"
ADDRESS = re.compile(
    r"hf:(?P<name>(?!\.|.*/\.)[\w.-]+(/[\w.-]+)?)"
    r"(@(?P<revision>(?!.*\.\.)[\w.+-]+(/[\w.+-]+)*))?",
    re.ASCII,
)
COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")

SETTINGS = ("config.json", "preprocessor_config.json", "README.md")
INDEX = "model.safetensors.index.json"
BEST_FIRST = ("model.safetensors", INDEX, "pytorch_model.bin")
ENDINGS = (".safetensors", ".npz", ".pth", ".pt")  # best first, if there is no usual name
DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"

log = logging.getLogger(__name__)


class UnreachableError(CheckpointError):
    """The hub does not answer, or not to the end: what is in the cache may serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """Where a repository is on the hub, and where its files are kept on this machine."""

    name: str
    revision: str = "main"
    endpoint: str
    cache: Path

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.name.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit


@dataclass(frozen=True, slots=True)
class Told:
    """What the server tells of a file; nothing, if it is a simple one."""

    size: int | None = None
    sha256: str | None = None


def is_address(reference: str) -> bool:
    """Whether a reference is meant for a hub. `fetch` says what is wrong with a bad one."""
    return reference.startswith(PREFIX)


def fetch(address: str) -> Path:
    """The folder with a repository's settings and weights, downloaded unless it is there.

    >>> fetch("hf:google/vit-base-patch16-224")
    >>> fetch("hf:google/vit-base-patch16-224@main")
    """
    repository = locate(address)
    if is_offline():
        kept = find_kept(repository)
        if kept is None:
            raise CheckpointError(
                f"{address} is not in the cache {repository.cache}, and HF_HUB_OFFLINE is set; "
                "unset it, or fetch the model once while online"
            )
        return kept
    try:
        commit, files = list_files(repository)
    except UnreachableError as error:
        kept = find_kept(repository)
        if kept is None:
            raise
        log.warning("using the copy in the cache: %s", error)
        return kept
    names = needed(repository, files)
    if not is_checked(repository, commit, names):
        download_model(repository, commit, names, files)
    remember_revision(repository, commit)
    return repository.snapshot(commit)


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a folder as the repository `owner/name`, made if need be; its address."""
    repository = destination(name)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder} to push")
    if is_offline():
        raise CheckpointError(f"cannot push to {PREFIX}{repository.name}: HF_HUB_OFFLINE is set")
    with clear_errors(repository, "push to"):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=repository.endpoint)
        # Not private: as public as the owner's repositories usually are.
        url = api.create_repo(repository.name, private=private or None, exist_ok=True)
        if private and not api.model_info(url.repo_id).private:
            raise CheckpointError(
                f"{PREFIX}{url.repo_id} is there already, and public; nothing was pushed: "
                "make it private on the hub, or choose another name"
            )
        api.upload_folder(repo_id=url.repo_id, folder_path=folder)
    return f"{PREFIX}{url.repo_id}"


def destination(name: str) -> Repository:
    """The repository that a push to `owner/name` goes to."""
    repository = locate(name if is_address(name) else PREFIX + name)
    if repository.revision != "main":
        raise CheckpointError(f"{name} names a revision; a push goes to hf:{repository.name}")
    return repository


def weight_files(names: Iterable[str]) -> list[str]:
    """The file of weights among a folder's names: none, one, or those one cannot choose among.

    The index of a sharded model stands for its shards.
    """
    names = sorted(names)
    for name in BEST_FIRST:
        if name in names:
            return [name]
    for ending in ENDINGS:
        found = [name for name in names if name.endswith(ending) and "/" not in name]
        if found:
            return found
    return []


def locate(address: str) -> Repository:
    """The repository an address names. The environment is read now, not when Python started."""
    from huggingface_hub import constants

    found = ADDRESS.fullmatch(address)
    if found is None:
        raise CheckpointError(
            f"{address!r} is no address on a hub; write hf:owner/name or hf:owner/name@revision"
        )
    home = os.environ.get("HF_HOME")
    cache = (
        os.environ.get("HF_HUB_CACHE")
        or os.environ.get("HUGGINGFACE_HUB_CACHE")
        or (home and os.path.join(home, "hub"))
        or constants.HF_HUB_CACHE
    )
    return Repository(
        name=found["name"],
        revision=found["revision"] or "main",
        endpoint=(os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
        cache=Path(os.path.expandvars(cache)).expanduser().resolve(),
    )


def is_offline() -> bool:
    from huggingface_hub import constants

    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return constants.HF_HUB_OFFLINE or said.upper() in constants.ENV_VARS_TRUE_VALUES


def list_files(repository: Repository) -> tuple[str, dict[str, Told]]:
    """The commit that the revision is now, and what the server tells of its files."""
    with clear_errors(repository, "fetch"):
        from huggingface_hub import HfApi, constants

        info = HfApi(endpoint=repository.endpoint).model_info(
            repository.name,
            revision=repository.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit):
            raise ValueError(f"the server names the commit {commit!r}")
        files = {}
        for file in info.siblings or ():
            size = file.lfs.size if file.lfs else file.size
            sha256 = file.lfs.sha256 if file.lfs else None
            files[str(file.rfilename)] = Told(None if size is None else int(size), sha256)
    return commit, files


def needed(repository: Repository, files: Iterable[str]) -> list[str]:
    """The files a model is made of: settings, then weights, or the index of sharded ones."""
    found = weight_files(files)
    if not found:
        there = listed(sorted(files)) or "nothing"
        raise CheckpointError(
            f"{PREFIX}{repository.name} holds no weights that can be read; it has {there}"
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{PREFIX}{repository.name} holds several files of weights, {listed(sorted(found))}; "
            f"get the one you mean with `hf download {repository.name} FILE`"
        )
    return [name for name in SETTINGS if name in files] + found


def download_model(
    repository: Repository, commit: str, names: list[str], files: dict[str, Told]
) -> None:
    """Bring the files a model is made of into the cache, check them, and note that."""
    download(repository, commit, {name: files[name] for name in names})
    if names[-1] == INDEX:
        shards = shard_names(repository.snapshot(commit) / INDEX)
        missing = [name for name in shards if name not in files]
        if missing:
            lost = listed(sorted(missing))
            raise CheckpointError(
                f"{PREFIX}{repository.name} has an index of weights, but not its {lost}"
            )
        download(repository, commit, {name: files[name] for name in shards})
        names = [*names, *shards]
    remember(repository, commit, names)


def download(repository: Repository, commit: str, files: dict[str, Told]) -> None:
    snapshot = repository.snapshot(commit)
    missing = [told.size or 0 for name, told in files.items() if not (snapshot / name).exists()]
    check_space(repository, sum(missing))
    for name, told in files.items():
        with clear_errors(repository, "fetch"):
            from huggingface_hub import hf_hub_download

            hf_hub_download(
                repository.name,
                name,
                revision=commit,
                endpoint=repository.endpoint,
                cache_dir=repository.cache,
            )
        check(repository, snapshot / name, told)


def shard_names(index: Path) -> list[str]:
    """The files that the index of a sharded model lists."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} lists no files of weights")
    return sorted(set(places.values()))


def check_space(repository: Repository, needed: int) -> None:
    """Refuse a download that cannot fit, before its first byte."""
    place = repository.cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if 0 < free < needed:  # a disk that says 0 may be one that does not know
        raise CheckpointError(
            f"{PREFIX}{repository.name} needs {size(needed)} in {repository.cache}, and "
            f"{size(free)} are free; make room, or set HF_HUB_CACHE to another disk"
        )


def check(repository: Repository, path: Path, told: Told) -> None:
    """Delete a file and say so if it is not what the server told."""
    size = path.stat().st_size
    blob = Path(os.readlink(path)).name if path.is_symlink() else ""
    sha256 = told.sha256 or (blob if SHA256.fullmatch(blob) else None)
    wrong = ""
    if told.size is not None and size != told.size:
        wrong = f"{size} bytes instead of {told.size}"
    elif sha256 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256.lower():
            wrong = f"sha256 {found[:12]}… instead of {sha256[:12]}…"
    if wrong:
        delete(path)
        raise CheckpointError(
            f"{path.name} of {PREFIX}{repository.name} arrived damaged ({wrong}) and was deleted; "
            "try again"
        )


def delete(path: Path) -> None:
    """Delete a file of the cache: the link in the snapshot, and what it links to."""
    while path.is_symlink():
        link, path = path, path.parent / os.readlink(path)
        link.unlink()
    path.unlink(missing_ok=True)


def find_kept(repository: Repository) -> Path | None:
    """The revision's folder in the cache, if all weights are there, whoever downloaded them."""
    ref = repository.folder / "refs" / repository.revision
    commit = ref.read_text().strip() if ref.is_file() else repository.revision
    snapshot = repository.snapshot(commit)
    if is_checked(repository, commit):
        return snapshot
    if not snapshot.is_dir():
        return None
    found = weight_files(path.name for path in snapshot.iterdir() if path.is_file())
    if len(found) != 1:
        return None
    names = shard_names(snapshot / INDEX) if found == [INDEX] else found
    if not all((snapshot / name).is_file() for name in names):
        return None
    for name in names:
        check(repository, snapshot / name, Told())
    remember(repository, commit, [*found, *names])
    return snapshot


def is_checked(repository: Repository, commit: str, names: Iterable[str] = ()) -> bool:
    """Whether `names` and all else that was checked of a commit are still the same files."""
    record = repository.folder / "checked" / f"{commit}.json"
    snapshot = repository.snapshot(commit)
    try:
        stamps = json.loads(record.read_text())
        return all(stamp(snapshot / name) == stamps[name] for name in {*stamps, *names})
    except (OSError, ValueError, LookupError, TypeError):
        return False


def remember(repository: Repository, commit: str, names: list[str]) -> None:
    """Note that these files were checked: reading a gigabyte at every start is a long wait."""
    snapshot = repository.snapshot(commit)
    with suppress(CheckpointError):  # a cache that is only to be read: they are checked again
        write_json(
            repository.folder / "checked" / f"{commit}.json",
            {name: stamp(snapshot / name) for name in names},
        )


def remember_revision(repository: Repository, commit: str) -> None:
    """Note which commit a revision is, for when the hub is out of reach."""
    ref = repository.folder / "refs" / repository.revision
    if repository.revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    with suppress(CheckpointError), whole_or_absent(ref) as temporary:
        temporary.write_text(commit)


def stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def clear_errors(repository: Repository, doing: str) -> Iterator[None]:
    """Turn whatever a hub, a network or a disk makes huggingface_hub raise into one line.

    What it raises depends on its version, its two transports and the server's answer. So all is
    caught, and nothing but its calls and answers may stand inside.
    """
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        raise explain(error, repository, doing) from None


def explain(error: BaseException, repository: Repository, doing: str) -> CheckpointError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError | RuntimeError) and error.__cause__:
        error = error.__cause__
    address, endpoint = PREFIX + repository.name, repository.endpoint
    cannot = f"cannot {doing} {address} at {endpoint}"
    reason = f"{type(error).__name__}: {one_line(error)}"
    match error:
        case GatedRepoError():
            page = f"{endpoint}/{repository.name}"
            return CheckpointError(f"{address} is gated: ask for access at {page}, then {LOGIN}")
        case RepositoryNotFoundError():
            return CheckpointError(
                f"there is no {address} at {endpoint}, or it is private: check the name, or {LOGIN}"
            )
        case RevisionNotFoundError():
            return CheckpointError(f"{address} has no revision {repository.revision!r}")
        case HfHubHTTPError():
            status = error.response.status_code
            answer = f"{cannot}: it answers {status} {one_line(error.server_message or '')}".strip()
            if status in (401, 403):
                return CheckpointError(f"{answer}; {LOGIN}")
            if status == 429 or status >= 500:
                return UnreachableError(f"{answer}; try again later")
            return CheckpointError(answer)
        case OSError() if error.errno in DISK_IS_FULL:
            return CheckpointError(f"{cannot}: the disk with {repository.cache} is full")
        case ConnectionError() | TimeoutError():
            return UnreachableError(f"{cannot}: {reason}; try again")
        case OSError() if error.errno is not None:
            place = error.filename or repository.cache
            return CheckpointError(f"{cannot}: {place}: {error.strerror}")
        case ValueError() | LookupError() | TypeError() | AttributeError() | AssertionError():
            return CheckpointError(f"{cannot}: {reason}")
        case _:
            return UnreachableError(f"{cannot}: {reason}; try again")


def one_line(words: object) -> str:
    return " ".join(str(words).split())[:200]
