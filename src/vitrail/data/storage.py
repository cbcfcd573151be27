"""Byte storage: random access to local and remote files, and atomic writes.

A path is local, or any URL that fsspec supports (`s3://…`, `memory://…`). A `FileReader` can be
pickled; another process opens its own files.
"""

import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from typing import Any

from vitrail.errors import DataError
from vitrail.extras import require

MAX_OPEN_FILES = 256  # systems commonly allow 1024
MAX_IMAGE_BYTES = 2**30  # a larger image file is a mistake or an attack
ALLOW_OUTSIDE = ContextVar("ALLOW_OUTSIDE", default=False)  # may lists refer to files anywhere?


class FileReader:
    """Reads ranges of files, of which it keeps some open. Threads share no file position."""

    def __init__(self) -> None:
        self.handles: dict[str, FileHandle] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"handles": {}}  # file descriptors do not survive pickling

    def read(self, path: str, start: int, size: int) -> bytes:
        """Read exactly `size` bytes; raise `DataError` if the file ends before."""
        if is_remote(path):  # one range request
            data = request(path, "cat_file", start=start, end=start + size)
        else:
            try:
                handle = self.handles.get(path)
                if handle is None:  # no lock: a fork could inherit it locked
                    handle = self.handles[path] = FileHandle(path)
                    while len(self.handles) > MAX_OPEN_FILES:
                        with suppress(RuntimeError, StopIteration, KeyError):  # lost a race
                            del self.handles[next(iter(self.handles))]
                data = os.pread(handle.fd, size, start)
            except (OSError, OverflowError) as error:
                raise read_error(path, error) from None
        if len(data) < size:
            raise DataError(f"{path} ends before byte {start + size:,}: truncated or modified")
        return data


class FileHandle:
    """File descriptor that is closed with its last reference."""

    __slots__ = ("fd",)

    def __init__(self, path: str) -> None:
        self.fd = -1
        # NONBLOCK: opening a named pipe called cat.jpg must not block
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self, close: Any = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


def is_remote(path: str) -> bool:
    return "://" in path


def request(url: str, method: str, **options: Any) -> Any:
    """Call a method of the fsspec filesystem of a URL."""
    fsspec = require("fsspec.core", extra="data", feature=url)
    try:
        filesystem, key = fsspec.url_to_fs(url)  # one connection per process
        result = getattr(filesystem, method)(key, **options)
        return [*map(filesystem.unstrip_protocol, result)] if method == "glob" else result
    except Exception as error:  # each backend has its own exceptions
        raise read_error(url, error) from None


def read_file(path: str) -> bytes:
    """Read a whole file of at most `MAX_IMAGE_BYTES`."""
    if is_remote(path):
        return request(path, "cat_file")
    try:
        handle = FileHandle(path)
        info = os.fstat(handle.fd)
        if not stat.S_ISREG(info.st_mode):
            raise DataError(f"{path} is not a regular file")
        if info.st_size > MAX_IMAGE_BYTES:
            raise DataError(
                f"{path} has {info.st_size:,} bytes, above the limit of {MAX_IMAGE_BYTES:,}"
            )
        return os.pread(handle.fd, info.st_size, 0)
    except (OSError, ValueError) as error:
        raise read_error(path, error) from None


def file_size(path: str) -> int:
    if is_remote(path):
        return int(request(path, "size"))
    try:
        return os.stat(path).st_size
    except (OSError, ValueError) as error:
        raise read_error(path, error) from None


def glob_files(pattern: str) -> list[str]:
    """Return the sorted paths of files that match a pattern with `*` and `?`."""
    if is_remote(pattern):
        return sorted(request(pattern, "glob"))
    return sorted(path for path in glob.glob(pattern) if os.path.isfile(path))


@contextmanager
def allow_outside(allowed: bool = True) -> Iterator[None]:
    """Allow datasets opened in this block to name files outside their own folder.

    >>> with vitrail.allow_outside():
    ...     vitrail.train("labels.csv", "runs/first")

    Without it, a list that could read any file of this machine is rejected.
    """
    token = ALLOW_OUTSIDE.set(allowed)
    try:
        yield
    finally:
        ALLOW_OUTSIDE.reset(token)


def is_inside(path: str, root: str) -> bool:
    """Return whether `path` with its links resolved is the resolved `root` or below it.

    A URL such as file:///etc/passwd would resolve to a path below the current folder; it is inside
    of / only, which stands for everything.
    """
    if is_remote(path):
        return root == os.sep
    try:
        return os.path.join(os.path.realpath(path), "").startswith(os.path.join(root, ""))
    except ValueError:  # a NUL byte: no such file can be read
        return True


def outside_error(list_path: str, name: str, root: str) -> DataError:
    return DataError(
        f"{list_path} names {name}, which is outside {root}; if you trust it, pass --allow-outside "
        "(in Python: with vitrail.allow_outside())"
    )


def same_location(one: str, other: str) -> bool:
    """Return whether two dataset references are equal or resolve to the same path."""
    paths = (os.path.expanduser(reference.removeprefix("file://")) for reference in (one, other))
    return one == other or len(set(map(os.path.realpath, paths))) == 1


def read_error(path: object, error: Exception) -> DataError:
    """Describe in one line why a file cannot be read."""
    match error:
        case FileNotFoundError():
            return DataError(f"file not found: {path}")
        case IsADirectoryError():
            return DataError(f"{path} is a folder, expected a file")
        case PermissionError():
            return DataError(f"permission denied: {path}")
        case OSError(strerror=str(reason)):
            return DataError(f"cannot read {path}: {reason}")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DataError(f"cannot read {path}: {lines[0][:200]}")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file completely, or leave the old one in place."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(
            content.encode("utf-8", "replace") if isinstance(content, str) else content
        )


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is deleted on failure."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.with_name(f".{path.name}.{token_hex(8)}")
        # EXCL follows no link. mkstemp would make the file private, and reading the umask, to undo
        # that, changes it for all threads.
        created = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        mode = os.fstat(created).st_mode
        os.close(created)
        temporary = name
        yield temporary
        with temporary.open("rb") as file:
            os.fchmod(file.fileno(), stat.S_IMODE(mode))  # safetensors makes its files private
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def cache_folder(name: str) -> Path | None:
    """Return the folder for cached results; None where the user has no home directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # no home directory
        return None
    return Path(os.environ.get("VITRAIL_CACHE") or base / "vitrail") / name
