"""A folder of states, each whole or absent: written under a hidden name, settled, and renamed.

This file knows nothing of what is in a state but its note, which has a digest of every file. All
processes see the same folder; what the first of them cannot do, all of them report.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail import distributed
from vitrail.errors import CheckpointError

NOTE = "state.json"
KEPT = 2  # the newest, and the one before in case a disk forgets


def add_state(where: Path, step: int, note: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Add a state to the folder `where`, and remove those it replaces; or leave all as it was."""
    json.dumps(note)  # what JSON cannot say is a mistake of ours, found before anything is written
    what = f"cannot save the run's state in {where}"
    hidden = where / f".step-{step}.partial"
    try:
        together(what, lambda: make_room(hidden), only_first=True)
        together(what, lambda: distributed.save_tensors(hidden, tensors))
        digests = together(what, lambda: digests_of(own_files(hidden)))
        note["files"] = {name: digest for part in digests for name, digest in part.items()}
        together(what, lambda: complete(hidden, note), only_first=True)
    except CheckpointError:
        if distributed.is_main():
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def newest_whole(where: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest undamaged state, its note, and what is wrong with those that are newer."""
    damaged: list[str] = []
    for place in distributed.broadcast_object(states(where)):
        try:
            note = together(f"{place} is damaged", partial(read_note, place))[0]
            together(f"{place} is damaged", partial(check_files, place, note["files"]))
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return place, note, damaged
    if damaged:
        raise CheckpointError(f"{damaged[0]}, and no other is whole; delete {where} to begin anew")
    raise CheckpointError(f"{where} has no saved state to go on from; begin anew")


def remove_all(where: Path) -> None:
    for place in states(where):
        remove(place)
    shutil.rmtree(where, ignore_errors=True)


def make_room(hidden: Path) -> None:
    """An empty folder to write into; what killed saves have left goes."""
    hidden.parent.mkdir(parents=True, exist_ok=True)
    for leftover in hidden.parent.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    hidden.mkdir()


def complete(hidden: Path, note: dict[str, Any]) -> None:
    """Make a state out of what was written, and let go of those it replaces."""
    where = hidden.parent
    before = states(where)
    note["saves"] = saves_of(before[0]) + 1 if before else 1
    note["digest"] = digest_of_note(note)
    with (hidden / NOTE).open("w", encoding="utf-8") as file:
        json.dump(note, file)
        file.flush()
        os.fsync(file.fileno())
    settle(hidden)
    name = hidden.name.removeprefix(".").removesuffix(".partial")
    taken = (where / name).exists()  # a run that was asked to end right after it had begun
    hidden.rename(where / (f"{name}.{note['saves']}" if taken else name))
    settle(where)
    for place in states(where)[KEPT:]:
        with suppress(OSError):  # the new state is complete, and this is tidying
            remove(place)


def states(where: Path) -> list[Path]:
    """All states, the newest first. A run may have gone back, so steps do not tell."""
    found = [place for place in where.glob("step-*") if (place / NOTE).is_file()]
    return sorted(found, key=saves_of, reverse=True)


def saves_of(place: Path) -> int:
    """How many saves there had been; 0 if the state cannot say."""
    try:
        return int(json.loads((place / NOTE).read_text(encoding="utf-8"))["saves"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0


def remove(place: Path) -> None:
    """Under a hidden name, so that half of a state is never taken for one."""
    hidden = place.with_name(f".{place.name}.partial")
    place.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def own_files(place: Path) -> list[Path]:
    """What this process wrote; the first also writes the table of all."""
    files = sorted(place.glob(f"__{distributed.rank()}_*"))
    return [place / ".metadata", *files] if distributed.is_main() else files


def digests_of(files: list[Path]) -> dict[str, str]:
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def digest_of_note(note: dict[str, Any]) -> str:
    rest = {key: value for key, value in note.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_note(place: Path) -> dict[str, Any]:
    try:
        note = json.loads((place / NOTE).read_text(encoding="utf-8"))
        if note["digest"] == digest_of_note(note):
            return note
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise CheckpointError(f"{NOTE} is not what was written")


def check_files(place: Path, digests: dict[str, str]) -> None:
    """Every file is what was written; processes share the work."""
    mine = sorted(digests)[distributed.rank() :: distributed.world_size()]
    for name, digest in digests_of([place / name for name in mine]).items():
        if digest != digests[name]:
            raise CheckpointError(f"{name} is not what was written")


def settle(folder: Path) -> None:
    """What the folder lists is on the disk, and not only on its way."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def together(what: str, act: Callable[[], Any], *, only_first: bool = False) -> list[Any]:
    """What `act` gives in each process; if it fails in one, all of them say so."""
    result, problem = None, None
    if distributed.is_main() or not only_first:
        try:
            result = act()
        except (OSError, CheckpointError) as error:
            problem = distributed.error_reason(error)
    results = distributed.all_gather_object((result, problem))
    for _, reason in results:
        if reason is not None:
            raise CheckpointError(f"{what}: {reason}")
    return [result for result, _ in results]
