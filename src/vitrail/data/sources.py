"""Open a data set, whatever it is: one line from a path or an address to samples.

    a folder of class folders, with or without train/ val/ test/        folders.py
    a list: .csv, .tsv, .jsonl; or a folder with labels.csv             lists.py
    .tar shards: a file, a folder, a pattern, s3://… or another         shards.py
    arrays: .npz, .npy                                                  arrays.py
    MNIST and CIFAR as published                                        published.py
    hf:owner/name, or a folder of parquet or Arrow files                hf_datasets.py
    builtin:sign-digits, which needs no download                        builtin/

Nothing here imports torch, and no picture is decoded.
"""

import json
import os
from collections.abc import Callable
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path

import numpy as np

from vitrail.data.arrays import from_npy, from_npz, part_of
from vitrail.data.files import Cloud, Disk
from vitrail.data.folders import any_picture, from_folder, split_order, subfolders
from vitrail.data.hf_datasets import from_hf, is_table_folder
from vitrail.data.lists import LISTS, from_list
from vitrail.data.published import IDX, cifar_folder, from_cifar, from_idx, idx_folder
from vitrail.data.samples import Collection, LabelSets, Samples, Source, is_picture
from vitrail.data.shards import from_shards, shards_at
from vitrail.data.splits import SPLITS, Splits, canonical, divide
from vitrail.errors import DataError, unknown

BUILTIN = {"sign-digits": "sign_digits_100.tar"}
ALL = "all"  # the name of the split that every sample belongs to
MOST_READ = 2**31  # bytes that are read to know a set exactly
UNREADABLE = b"unreadable"  # in the place of a picture's bytes
LOOKED_AT = 64  # pictures that speak for all in a fingerprint where no sizes are known
PACKED = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")


def open_source(
    reference: str | os.PathLike[str],
    split: str = "train",
    *,
    splits: Splits | None = None,
    allow_truncated: bool = False,
) -> Samples:
    """The samples of one split of a data set; of all of them for the split "all".

    A set that states its splits keeps them; `splits` cuts those it lacks out of its train. A set
    that states none is divided by `splits`, or 80 : 10 : 10. With `allow_truncated`, what is whole
    of a broken tar is taken.
    """
    reference, split = os.fspath(reference), canonical(split)
    wanted = None if splits or split == ALL else split
    collection = collect(reference, wanted, allow_truncated=allow_truncated)
    if split == ALL:
        return Samples(collection)
    if splits is None and collection.split is None:
        splits = Splits()
    names, places, notes = divided(collection, splits)
    rows = np.flatnonzero(places == names.index(split)) if split in names else np.zeros(0, int)
    if not len(rows):
        known = collection.split_names or [names[place] for place in np.unique(places)]
        raise DataError(f"{reference} has no split {split!r}; it has: {', '.join(known)}")
    return Samples(collection, None if len(rows) == len(places) else rows, notes, splits)


def splits_of(reference: str | os.PathLike[str], *, splits: Splits | None = None) -> dict[str, int]:
    """How many samples each split has."""
    names, places, _ = divided(collect(os.fspath(reference), None), splits)
    counts = dict(zip(names, np.bincount(places, minlength=len(names)).tolist(), strict=True))
    return {name: counts[name] for name in sorted(names, key=split_order) if counts[name]}


def judged_split(reference: str | os.PathLike[str], *, splits: Splits | None = None) -> str | None:
    """The split that a model is judged by: test, or else val; None if the set has neither."""
    counts = splits_of(reference, splits=splits)
    return next((name for name in ("test", "val") if name in counts), None)


def fingerprint(source: Source) -> str:
    """A text that is the same for the same samples, and another for others.

    It is made of classes, names, labels and sizes; where sizes are not known, of some pictures.
    Times and places do not count, so copies on two machines have the same.
    """
    digest = blake2b(digest_size=16)
    labels = source.labels()
    numbers, ends = (labels.classes, labels.ends) if isinstance(labels, LabelSets) else (labels, [])
    digest.update(json.dumps([list(source.classes), len(source)]).encode())
    digest.update(np.asarray(numbers).astype("<i4").tobytes())
    digest.update(np.asarray(ends).astype("<i8").tobytes())
    for index in range(len(source)):
        digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\0")
    sizes = source.sizes() if isinstance(source, Samples) else None
    if sizes is not None:
        digest.update(sizes.astype("<i8").tobytes())
    for index in np.linspace(0, len(source) - 1, LOOKED_AT, dtype=int) if sizes is None else ():
        digest.update(picture_bytes(source, int(index)))
    return digest.hexdigest()


def contents(source: Source) -> str:
    """A text that is the same for the same pictures, byte for byte, and another for others.

    Of a set of more than `MOST_READ` bytes, some pictures speak for all, beside every one's size.
    """
    digest = blake2b(fingerprint(source).encode(), digest_size=16)
    sizes = source.sizes() if isinstance(source, Samples) else None
    few = sizes is None or int(sizes.sum()) <= MOST_READ
    rows = range(len(source)) if few else np.linspace(0, len(source) - 1, LOOKED_AT, dtype=int)
    for index in rows:
        digest.update(picture_bytes(source, int(index)))
    return digest.hexdigest()


def picture_bytes(source: Source, index: int) -> bytes:
    try:
        data = source[index].data
    except (DataError, IndexError):
        return UNREADABLE
    return f"{data.shape}".encode() + data.tobytes() if isinstance(data, np.ndarray) else data


def divided(
    collection: Collection, splits: Splits | None
) -> tuple[tuple[str, ...], np.ndarray, list[str]]:
    """The names of the splits, for each sample its place among them, and what was done."""
    if collection.split is None:
        splits = splits or Splits()
        places = divide(collection.names, collection.labels, splits)
        return SPLITS, places, [f"the set states no splits and was divided: {splits}"]
    names, places = collection.split_names, collection.split
    lacking = [name for name in ("val", "test") if name not in names]
    if splits is None or not lacking or "train" not in names:
        return names, places, []
    shares = {name: getattr(splits, name) if name in lacking else 0.0 for name in ("val", "test")}
    rows = np.flatnonzero(places == names.index("train"))
    train = Samples(collection, rows)
    called = [train.name(index) for index in range(len(train))]
    cut = divide(called, train.labels(), Splits(**shares, seed=splits.seed))
    names, places = (*names, *lacking), places.copy()
    places[rows] = np.array([names.index(name) for name in SPLITS], np.uint8)[cut]
    return names, places, [f"{' and '.join(lacking)} cut out of train by seed {splits.seed}"]


def collect(reference: str, wanted: str | None, *, allow_truncated: bool = False) -> Collection:
    """Everything that a reference stands for; of one stated split only, if that saves work."""
    kind, _, rest = reference.partition(":")
    if kind == "builtin":
        if rest not in BUILTIN:
            raise unknown("built-in data set", rest, BUILTIN)
        place = files("vitrail.data") / "builtin" / BUILTIN[rest]
        return from_shards([str(place)], Disk(), wanted, keep_index=False)
    if kind == "hf":
        return from_hf(reference)
    local = os.path.expanduser(reference.removeprefix("file://"))
    storage = Cloud() if "://" in local else Disk()
    if isinstance(storage, Disk) and os.path.isdir(local) and not holds_shards(Path(local)):
        return from_directory(Path(local), wanted)
    is_pattern = isinstance(storage, Cloud) or any(sign in local for sign in "*?{")
    if local.lower().endswith(".tar") or os.path.isdir(local) or is_pattern:
        paths = shards_at(local, storage)
        return from_shards(paths, storage, wanted, allow_truncated=allow_truncated)
    if os.path.isfile(local):
        return from_file(Path(local))
    raise DataError(
        f"there is no data set {reference}; give a folder of class folders, a list, .tar or .npz "
        "files, builtin:sign-digits, or hf:owner/name"
    )


def holds_shards(folder: Path) -> bool:
    """Whether the pictures are in tars; an archive beside class folders is not meant."""
    tars = (next(folder.glob(pattern), None) for pattern in ("*.tar", "*/*.tar"))
    return any(tars) and list_in(folder) is None and not has_pictures(folder)


def from_directory(folder: Path, wanted: str | None) -> Collection:
    if (path := list_in(folder)) is not None:
        return from_list(path)
    if (place := idx_folder(folder)) is not None:
        return from_idx(place)
    if (found := cifar_folder(folder)) is not None:
        return from_cifar(*found)
    if not has_pictures(folder):
        if is_table_folder(folder):
            return from_hf(str(folder))
        if any(part_of(file.stem)[0] == "images" for file in folder.glob("*.npy")):
            return from_npy(folder)
    return from_folder(folder, wanted)


def from_file(path: Path) -> Collection:
    suffix = path.suffix.lower()
    if suffix in LISTS:
        return from_list(path)
    if IDX.fullmatch(path.name):
        return from_idx(path.parent)
    if suffix in READERS:
        return READERS[suffix](path)
    if suffix in PACKED:
        raise DataError(f"{path} is compressed and cannot be read at random; unpack it first")
    if is_picture(path.name):
        raise DataError(f"{path} is one picture; a folder of class folders is needed")
    raise DataError(f"{path} is no kind of data set that is known here")


READERS: dict[str, Callable[[Path], Collection]] = {
    ".npz": from_npz,
    ".npy": from_npy,
    ".parquet": lambda path: from_hf(str(path)),
    ".arrow": lambda path: from_hf(str(path)),
}


def list_in(folder: Path) -> Path | None:
    """The list that a folder brings along, if there is one."""
    found = (folder / f"labels{ending}" for ending in LISTS)
    return next((path for path in found if path.is_file()), None)


def has_pictures(folder: Path) -> bool:
    return any(any_picture(folder / name) for name in subfolders(folder))
