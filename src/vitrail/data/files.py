"""Bytes of files: read at any place by any thread, and written whole or not at all.

`Disk` reads files of this machine, `Cloud` what stands behind an address that fsspec knows
(`s3://…`, `memory://…`). Both can be sent to another process, which opens its own files.
"""

import glob
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from vitrail.errors import DataError
from vitrail.extras import require

MOST_OPEN = 256  # files at once; systems commonly allow 1024
MOST_BYTES = 2**30  # of one picture; more is a mistake or an attack
OUTSIDE = ContextVar("OUTSIDE", default=False)  # whether data sets may name files anywhere


class Storage(Protocol):
    """Files by path or address."""

    def read(self, path: str, start: int, size: int) -> bytes:
        """Exactly `size` bytes; a `DataError` if the file ends before."""
        ...

    def read_all(self, path: str) -> bytes: ...

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def matching(self, pattern: str) -> list[str]:
        """The files whose path fits a pattern with `*` and `?`, sorted."""
        ...


class Handle:
    """An open file that closes itself when the last reader lets go of it."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = -1
        # NONBLOCK: a pipe that is named like a picture must not be waited for
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self, close: Any = os.close) -> None:
        if self.number >= 0:
            close(self.number)


class Disk:
    """Files of this machine. Reading moves no shared position, so threads do not meet."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"handles": {}}  # another process opens its own

    def read(self, path: str, start: int, size: int) -> bytes:
        try:
            handle = self.handles.get(path) or self.keep(path)
            data = os.pread(handle.number, size, start)
        except (OSError, OverflowError) as error:
            raise cannot_read(path, error) from None
        if len(data) < size:
            raise DataError(f"{path} ends before byte {start + size:,}: it is cut off or changed")
        return data

    def keep(self, path: str) -> Handle:
        """Open a file for the reads to come. No lock: a fork could inherit it locked."""
        handle = self.handles[path] = Handle(path)
        while len(self.handles) > MOST_OPEN:
            with suppress(RuntimeError, StopIteration, KeyError):  # another thread was faster
                del self.handles[next(iter(self.handles))]
        return handle

    def read_all(self, path: str) -> bytes:
        try:
            handle = Handle(path)
            about = os.fstat(handle.number)
            if not stat.S_ISREG(about.st_mode):
                raise DataError(f"{path} is no ordinary file")
            if about.st_size > MOST_BYTES:
                raise DataError(f"{path} has {about.st_size:,} bytes, more than a picture may have")
            return os.pread(handle.number, about.st_size, 0)
        except (OSError, ValueError) as error:
            raise cannot_read(path, error) from None

    def size(self, path: str) -> int:
        try:
            return os.stat(path).st_size
        except (OSError, ValueError) as error:
            raise cannot_read(path, error) from None

    def exists(self, path: str) -> bool:
        return os.path.isfile(path)

    def matching(self, pattern: str) -> list[str]:
        return sorted(path for path in glob.glob(pattern) if os.path.isfile(path))


class Cloud:
    """Files behind an address; each read is one request for a range of bytes."""

    def read(self, path: str, start: int, size: int) -> bytes:
        data = self.ask(
            path, lambda system, key: system.cat_file(key, start=start, end=start + size)
        )
        if len(data) < size:
            raise DataError(f"{path} ends before byte {start + size:,}: it is cut off or changed")
        return data

    def read_all(self, path: str) -> bytes:
        return self.ask(path, lambda system, key: system.cat_file(key))

    def size(self, path: str) -> int:
        return int(self.ask(path, lambda system, key: system.size(key)))

    def exists(self, path: str) -> bool:
        try:
            return bool(self.ask(path, lambda system, key: system.isfile(key)))
        except DataError:  # some stores forbid to ask for what is not there
            return False

    def matching(self, pattern: str) -> list[str]:
        found = self.ask(
            pattern, lambda system, key: [*map(system.unstrip_protocol, system.glob(key))]
        )
        return sorted(found)

    def ask(self, address: str, question: Any) -> Any:
        fsspec = require("fsspec.core", extra="data", feature=address)
        try:
            system, key = fsspec.url_to_fs(address)  # it keeps one connection per process
            return question(system, key)
        except Exception as error:  # whatever the library behind the address throws
            raise cannot_read(address, error) from None


@contextmanager
def allow_outside(allowed: bool = True) -> Iterator[None]:
    """Let data sets opened in this block name files outside their own folder.

    >>> with vitrail.allow_outside():
    ...     vitrail.train("labels.csv", "runs/first")

    Without it, a list is refused that could read any file of this machine.
    """
    token = OUTSIDE.set(allowed)
    try:
        yield
    finally:
        OUTSIDE.reset(token)


def is_inside(path: str, root: str) -> bool:
    """Whether a path with its links resolved is `root`, which has none, or below it."""
    try:
        return os.path.join(os.path.realpath(path), "").startswith(os.path.join(root, ""))
    except ValueError:  # a NUL byte: no such file can be read
        return True


def outside(where: str, name: str, root: str) -> DataError:
    return DataError(
        f"{where} names {name}, which is outside {root}; if you trust it, give --allow-outside "
        "(in Python: with vitrail.allow_outside())"
    )


def same_data(one: str, other: str) -> bool:
    """Whether two references mean the same data set: the same words, or the same place."""

    def place(reference: str) -> str:
        return os.path.realpath(os.path.expanduser(reference.removeprefix("file://")))

    return one == other or place(one) == place(other)


def cannot_read(path: object, error: Exception) -> DataError:
    """One line about why a file cannot be read."""
    match error:
        case FileNotFoundError():
            return DataError(f"there is no file {path}")
        case IsADirectoryError():
            return DataError(f"{path} is a folder where a file is expected")
        case PermissionError():
            return DataError(f"{path} may not be read by this user")
        case OSError(strerror=str(reason)):
            return DataError(f"cannot read {path}: {reason}")
    words = str(error).strip().splitlines() or [type(error).__name__]
    return DataError(f"cannot read {path}: {words[0][:200]}")


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole, or leave what was there."""
    with whole_or_absent(path) as temporary:
        temporary.write_bytes(
            content.encode("utf-8", "replace") if isinstance(content, str) else content
        )


@contextmanager
def whole_or_absent(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` if all goes well, and goes if not."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~current_umask())
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def cache_folder(name: str) -> Path | None:
    """Where what can be made again is kept; None on a machine without a place for such things."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        own = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return Path(os.environ.get("VITRAIL_CACHE") or own / "vitrail") / name
