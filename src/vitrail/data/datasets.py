"""Open a dataset of any format, and assign its splits.

    dataset = open_dataset("photos/", "train")
    dataset[0]                            Sample(data=b"…", label=2, name="rose/1.jpg")

    folders, with or without train/ val/ test/; .csv, .tsv and .jsonl lists     folders.py
    .tar shards: a file, a folder, a pattern, s3://…                            tar_shards.py
    .npz and .npy arrays; MNIST and CIFAR as published                          arrays.py
    hf:owner/name, or a folder of parquet or Arrow files                        arrays.py
    builtin:sign-digits, which needs no download                                builtin/

A `DatasetIndex` holds the names and labels of all samples in arrays, so that a million samples take
some tens of megabytes; an `ImageDataset` is a subset of it, usually one split. Opening imports
neither torch nor Pillow, and decodes no image.
"""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from vitrail.data.storage import is_remote
from vitrail.errors import ConfigError, DataError, renamed_attribute, similar_path, unknown
from vitrail.formatting import comma_list

Label = int | tuple[int, ...]

SPLITS = ("train", "val", "test")
SPLIT_ALIASES = {
    "training": "train",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "testing": "test",
}
ALL = "all"  # the split that contains every sample
BUILTIN = {"sign-digits": "sign_digits_100.tar"}
COMPRESSED = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
IMAGE_EXTENSIONS = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".webp"))
IMAGE_EXTENSIONS |= {".avif", ".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}


class Sample(NamedTuple):
    data: bytes | np.ndarray  # encoded image, or pixels uint8 (H, W) or (H, W, C)
    label: Label  # one class, or all classes that apply
    name: str  # path in the folder, member of a shard, or row of an array


class Dataset(Protocol):
    """Map-style dataset of encoded images. It can be pickled."""

    classes: tuple[str, ...]
    multi_label: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample:
        """Read one sample; raise `DataError` if it cannot be read."""
        ...

    def name(self, index: int, /) -> str:
        """Return the name of a sample without reading it."""
        ...

    def labels(self) -> "np.ndarray | LabelSets":
        """Return all labels without reading an image; tuples if the dataset is multi-label."""
        ...


class ImageStore:
    """Where the images of a dataset are read from."""

    in_memory = False  # whether images are pixels in memory, where worker processes do not pay off

    def read(self, row: int) -> bytes | np.ndarray:
        raise NotImplementedError

    def sizes(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the size of each image in bytes without reading any; None if unknown."""
        return None


class PackedStrings:
    """Strings in two arrays, a tenth of the memory of a list."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.bytes = bytearray()
        self.ends = array("q")
        for string in strings:
            self.append(string)

    def append(self, string: str) -> None:
        self.bytes += string.encode("utf-8", "surrogateescape")  # file names may be any bytes
        self.ends.append(len(self.bytes))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int, /) -> str:
        start = self.ends[index - 1] if index else 0
        return self.bytes[start : self.ends[index]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


@dataclass(eq=False)
class LabelSets:
    """Labels of a multi-label dataset: for each sample the classes that apply."""

    classes: np.ndarray  # labels of all samples, concatenated
    ends: np.ndarray  # (n,) where the labels of each sample end

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int, /) -> tuple[int, ...]:
        index = index + len(self) if index < 0 else index
        start = self.ends[index - 1] if index else 0
        return tuple(self.classes[start : self.ends[index]].tolist())

    def take(self, rows: np.ndarray) -> "LabelSets":
        starts = np.concatenate([[0], self.ends[:-1]])[rows] if len(self) else rows
        counts = self.ends[rows] - starts
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return LabelSets(self.classes[np.repeat(starts, counts) + inside], ends)


class SampleEncoder:
    """Collects labels and split of each sample as strings, and encodes them once all are known."""

    def __init__(self, *, multi_label: bool = False) -> None:
        self.codes: dict[str, int] = {}  # label → position of its first occurrence
        self.values = array("i")
        self.ends = array("q")
        self.multi_label = multi_label
        self.split_codes: dict[str, int] = {}
        self.split_values = bytearray()

    def add(self, labels: Sequence[str], split: str = "", *, multi_label: bool = False) -> None:
        for label in labels:
            self.values.append(self.codes.setdefault(label, len(self.codes)))
        self.ends.append(len(self.values))
        self.multi_label |= multi_label
        if len(self.split_codes) >= 255 and split not in self.split_codes:
            raise DataError(f"the split column has more than 255 values, such as {split!r}")
        self.split_values.append(self.split_codes.setdefault(split, len(self.split_codes)))

    def labels(
        self, class_ids: dict[str, int], classes: tuple[str, ...], source: str
    ) -> np.ndarray | LabelSets:
        for label in self.codes:
            if label not in class_ids:
                raise DataError(
                    f"{source}: unknown label {label!r}; the {len(classes):,} classes are "
                    f"{comma_list(classes)}"
                )
        if not self.multi_label and len(self.values) != len(self.ends):
            raise DataError(f"{source}: some images do not have exactly one label")
        ids = np.array([class_ids[label] for label in self.codes], np.int32)
        labels = ids[np.frombuffer(self.values, np.int32)] if len(self.values) else ids
        ends = np.frombuffer(self.ends, np.int64) if len(self.ends) else np.zeros(0, np.int64)
        return LabelSets(labels, ends) if self.multi_label else labels

    def index(
        self,
        source: str,
        names: PackedStrings,
        store: ImageStore,
        classes: tuple[str, ...],
        class_ids: dict[str, int],
        *,
        splits: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> "DatasetIndex":
        """Return the index of all samples; `splits` are named by the dataset even if empty."""
        split_names, split_ids = (), None
        if not set(self.split_codes) <= {""}:
            if "" in self.split_codes:
                raise DataError(f"{source}: some images have a split and others do not")
            stated = {canonical_split(name) for name in (*self.split_codes, *splits)}
            split_names = tuple(sorted(stated, key=split_order))
            ids = [split_names.index(canonical_split(name)) for name in self.split_codes]
            split_ids = np.array(ids, np.uint8)[np.frombuffer(self.split_values, np.uint8)]
        labels = self.labels(class_ids, classes, source)
        return DatasetIndex(names, labels, classes, store, split_names, split_ids, tuple(notes))


class DatasetIndex(NamedTuple):
    """Names, labels and splits of all samples of a dataset."""

    names: PackedStrings
    labels: np.ndarray | LabelSets
    classes: tuple[str, ...]
    store: ImageStore
    split_names: tuple[str, ...] = ()  # splits that the dataset defines itself
    split_ids: np.ndarray | None = None  # (n,) position of each sample's split in `split_names`
    notes: tuple[str, ...] = ()  # skipped files and other warnings


class ImageDataset:
    """A dataset, or a subset of it in the order of its index."""

    def __init__(
        self,
        index: DatasetIndex,
        rows: np.ndarray | None = None,
        notes: Iterable[str] = (),
        splits: "Splits | None" = None,
    ) -> None:
        self.index = index
        self.rows = np.arange(len(index.names)) if rows is None else rows
        self.splits = splits  # how the dataset was split if it does not define splits itself
        self.classes = index.classes
        self.multi_label = isinstance(index.labels, LabelSets)
        self.in_memory = index.store.in_memory
        self.notes = (*index.notes, *notes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Sample:
        row = self.row(index)
        label = self.index.labels[row]
        label = label if isinstance(label, tuple) else int(label)
        return Sample(self.index.store.read(row), label, self.index.names[row])

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def name(self, index: int, /) -> str:
        return self.index.names[self.row(index)]

    def labels(self) -> np.ndarray | LabelSets:
        labels = self.index.labels
        return labels.take(self.rows) if isinstance(labels, LabelSets) else labels[self.rows]

    def class_ids(self) -> np.ndarray:
        """Return the labels of a single-label dataset: int64 (n,)."""
        labels = self.labels()
        assert not isinstance(labels, LabelSets)
        return np.asarray(labels, np.int64)

    def class_counts(self) -> np.ndarray | None:
        """Return the images of each class: int64 (K,); None for a multi-label dataset."""
        if self.multi_label:
            return None
        return np.bincount(self.class_ids(), minlength=len(self.classes))

    def subset(self, indices: np.ndarray) -> "ImageDataset":
        """Return the samples at indices, or where a mask is true."""
        return ImageDataset(self.index, self.rows[indices], splits=self.splits)

    numbers = renamed_attribute("numbers", "class_ids")
    take = renamed_attribute("take", "subset")

    def sizes(self) -> np.ndarray | None:
        """Return the size of each image in bytes without reading any; None if unknown."""
        return self.index.store.sizes(self.rows)

    def row(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        return int(self.rows[index])


def sort_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Sort class names: numerically if all are numbers, else alphabetically."""
    names = set(names)
    if not all(name.isascii() and name.isdigit() for name in names):
        return tuple(sorted(names))
    # `int` rejects thousands of digits
    return tuple(sorted(names, key=lambda n: (len(n.lstrip("0")), n.lstrip("0"), n)))


def case_collisions(classes: Iterable[str]) -> list[str]:
    """Return a warning for each pair of classes that differ in case only."""
    first: dict[str, str] = {}
    return [
        f"classes {first[key]!r} and {name!r} differ only in case and are two classes"
        for name in classes
        if first.setdefault(key := name.casefold(), name) != name
    ]


def is_image_name(name: str) -> bool:
    return name[name.rfind(".") :].lower() in IMAGE_EXTENSIONS


# Splits. A dataset that defines splits keeps them. Any other is split class by class in the order
# of a hash of (seed, name): the same on every machine, and adding an image moves at most three
# others of its class, those at the boundaries.


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How to split a dataset that defines no splits; the rest is train."""

    val: float = 0.1
    """Fraction of the images for validation."""
    test: float = 0.1
    """Fraction of the images for testing."""
    seed: int = 0
    """Seed of the split."""

    def __post_init__(self) -> None:
        if min(self.val, self.test) < 0 or self.val + self.test >= 1:
            raise ConfigError(
                f"val={self.val} and test={self.test} must be fractions whose sum is below 1"
            )

    def __str__(self) -> str:
        train = 1 - self.val - self.test
        return f"{train:.0%} train, {self.val:.0%} val, {self.test:.0%} test (seed {self.seed})"


def canonical_split(name: str) -> str:
    """Return `val` for `Validation`; other names stay as they are."""
    lower = name.strip().lower()
    lower = SPLIT_ALIASES.get(lower, lower)
    return lower if lower in SPLITS else name.strip()


def split_order(name: str) -> tuple[int, str]:
    """Sort key: train, val, test, then others alphabetically."""
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS), name)


def assign_splits(
    names: Iterable[str], labels: np.ndarray | LabelSets, splits: Splits
) -> np.ndarray:
    """Return the position in `SPLITS` for each sample, stratified by class."""
    if isinstance(labels, LabelSets):  # an image of several classes counts for the rarest of them
        counts = np.bincount(labels.classes) if len(labels.classes) else np.zeros(1, np.int64)
        rarest = (min(ids, key=lambda c: counts[c], default=-1) for ids in labels)
        labels = np.fromiter(rarest, np.int64, len(labels))
    keys = (f"{splits.seed}\0{name}".encode("utf-8", "surrogateescape") for name in names)
    digests = b"".join(blake2b(key, digest_size=8).digest() for key in keys)
    order = np.lexsort((np.frombuffer(digests, "<u8"), labels))
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    val, test = (  # at least one image of a class of three or more
        np.clip(
            np.floor(counts * fraction + 0.5).astype(np.int64),
            np.where((counts >= 3) & (fraction > 0), 1, 0),
            np.maximum(counts - 1, 0),
        )
        for fraction in (splits.val, splits.test)
    )
    test = np.minimum(test, np.maximum(counts - 1 - val, 0))
    rank = np.arange(len(order)) - np.repeat(starts, counts)
    is_held_out = rank < np.repeat(val + test, counts)
    split_ids = np.zeros(len(order), np.uint8)
    split_ids[order] = np.where(rank < np.repeat(val, counts), 1, np.where(is_held_out, 2, 0))
    return split_ids


def stratified_subset(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return sorted indices of `count` samples, with classes in proportion and none left out.

    Classes are shuffled. The r-th image of a class of n has priority n / sqrt(r (r - 1)), and those
    with the highest are chosen: Huntington-Hill apportionment.
    """
    order = rng.permutation(len(labels))
    shuffled = labels[order]
    counts = np.bincount(labels)
    rank = np.empty(len(labels))  # within the class, from 0
    starts = np.cumsum(counts) - counts
    by_class = np.argsort(shuffled, kind="stable")
    rank[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    size = counts[shuffled]
    with np.errstate(divide="ignore"):
        priority = size / np.sqrt(rank * (rank + 1))
    return np.sort(order[np.lexsort((-size, -priority))[:count]])


def split_dataset(index: DatasetIndex, splits: Splits | None) -> dict[str, ImageDataset]:
    """Return all splits with samples; `splits` takes missing ones from train."""
    names, ids, notes = index.split_names, index.split_ids, []
    missing = [name for name in ("val", "test") if name not in names]
    if ids is None:
        splits = splits or Splits()
        names, ids = SPLITS, assign_splits(index.names, index.labels, splits)
        notes = [f"dataset defines no splits; using {splits}"]
    elif splits is not None and missing and "train" in names:
        fractions = {name: getattr(splits, name) if name in missing else 0.0 for name in SPLITS[1:]}
        rows = np.flatnonzero(ids == names.index("train"))
        train_names = (index.names[row] for row in rows.tolist())
        train_labels = ImageDataset(index, rows).labels()
        parts = assign_splits(train_names, train_labels, Splits(**fractions, seed=splits.seed))
        names, ids = (*names, *missing), ids.copy()
        ids[rows] = np.array([names.index(name) for name in SPLITS], np.uint8)[parts]
        notes = [f"{' and '.join(missing)} held out from train (seed {splits.seed})"]
    datasets = {}
    for name in sorted(names, key=split_order):
        rows = np.flatnonzero(ids == names.index(name))
        if len(rows):
            datasets[name] = ImageDataset(index, rows, notes, splits)
    return datasets


# Opening.


def open_dataset(
    reference: str | os.PathLike[str],
    split: str = "train",
    *,
    splits: Splits | None = None,
    allow_truncated: bool = False,
) -> ImageDataset:
    """Open one split of a dataset, or all of it as split "all".

    A dataset that defines splits keeps them; `splits` takes missing ones from its train split. A
    dataset without splits is split by `splits`, by default 80 : 10 : 10. With `allow_truncated`,
    the intact part of a damaged tar is used.
    """
    reference, split = os.fspath(reference), canonical_split(split)
    only = None if splits or split == ALL else split
    index = load_index(reference, only, allow_truncated=allow_truncated)
    if split == ALL:
        return ImageDataset(index)
    datasets = split_dataset(index, splits)
    if split not in datasets:
        available = ", ".join(index.split_names or datasets)
        raise DataError(f"{reference} has no split {split!r}; available: {available}")
    return datasets[split]


def open_splits(
    reference: str | os.PathLike[str], *, splits: Splits | None = None
) -> dict[str, ImageDataset]:
    """Open every split, each as `open_dataset` does, reading the dataset's index only once."""
    from vitrail.data.tar_shards import ShardStore

    index = load_index(os.fspath(reference))
    datasets = split_dataset(index, splits)
    is_split = splits is None and index.split_ids is not None
    if is_split and isinstance(index.store, ShardStore) and len(index.store.paths) > 1:
        # The name of a sample, and so the fingerprint, depends on how many shards are opened.
        return {name: open_dataset(reference, name) for name in datasets}
    return datasets


def split_counts(
    reference: str | os.PathLike[str], *, splits: Splits | None = None
) -> dict[str, int]:
    datasets = split_dataset(load_index(os.fspath(reference)), splits)
    return {name: len(dataset) for name, dataset in datasets.items()}


def evaluation_split(
    reference: str | os.PathLike[str], *, splits: Splits | None = None
) -> str | None:
    """Return the split to evaluate on: test, else val, else None."""
    counts = split_counts(reference, splits=splits)
    return next((name for name in ("test", "val") if name in counts), None)


def load_index(
    reference: str, split: str | None = None, *, allow_truncated: bool = False
) -> DatasetIndex:
    """Read the index of a dataset; of one split only, where the format makes that cheaper."""
    from vitrail.data import arrays, folders, tar_shards  # which import this module

    kind, _, name = reference.partition(":")
    if kind == "builtin":
        if name not in BUILTIN:
            raise unknown("built-in dataset", name, BUILTIN)
        path = files("vitrail.data") / "builtin" / BUILTIN[name]
        return tar_shards.index_shards([str(path)], split, use_cache=False)
    if kind == "hf":
        return arrays.index_hf(reference)
    path = os.path.expanduser(reference.removeprefix("file://"))
    is_pattern = is_remote(path) or any(sign in path for sign in "*?{")
    if os.path.isdir(path) and (index := index_directory(Path(path), split)) is not None:
        return index
    if path.lower().endswith(".tar") or os.path.isdir(path) or is_pattern:
        paths = tar_shards.find_shards(path)
        return tar_shards.index_shards(paths, split, allow_truncated=allow_truncated)
    if not os.path.isfile(path):
        expected = (
            ". Expected a folder with one subfolder per class, a CSV list, .tar or .npz files, "
            "builtin:sign-digits, or hf:owner/name"
        )
        raise DataError(f"Dataset not found: {reference}{similar_path(path) or expected}")
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in folders.LIST_EXTENSIONS:
        return folders.index_list(path)
    if arrays.IDX_FILE.fullmatch(path.name):
        return arrays.index_idx(path.parent)
    if suffix in (".npz", ".npy"):
        return arrays.index_array_files(path)
    if suffix in (".parquet", ".arrow"):
        return arrays.index_hf(str(path))
    if suffix in COMPRESSED:
        raise DataError(f"{path} is compressed and has no random access; unpack it first")
    if is_image_name(path.name):
        raise DataError(f"{path} is a single image; expected a folder with one subfolder per class")
    raise DataError(
        f"{path} is not a supported dataset format; expected a list (.csv, .tsv, .jsonl), .tar, "
        ".npz, .npy, .parquet or .arrow"
    )


def index_directory(folder: Path, split: str | None) -> DatasetIndex | None:
    """Index a folder by what it contains; None for tar shards.

    Images take precedence over tars and tables in the same folder; lists and published files take
    precedence over images. Class folders come first in this code, so that the slow scan is done
    once.
    """
    from vitrail.data import arrays, folders

    for extension in folders.LIST_EXTENSIONS:
        if (path := folder / f"labels{extension}").is_file():
            return folders.index_list(path)
    published = arrays.find_published(folder)
    if published is None and (index := folders.index_folder(folder, split)) is not None:
        return index
    subfolders, images = folders.list_folder(folder)
    if any(next(folder.glob(pattern), None) for pattern in ("*.tar", "*/*.tar")) and not (
        published and any(folders.any_image(folder / name) for name in subfolders)
    ):
        return None
    if published is not None:
        return published()
    if any(next(folder.glob(pattern), None) for pattern in arrays.TABLE_FILES):
        return arrays.index_hf(str(folder))
    if any(arrays.array_role(file.stem)[0] == "images" for file in folder.glob("*.npy")):
        return arrays.index_array_files(folder)
    reason = "contains no images" if folders.list_entries(folder) else "is empty"
    if images:
        reason = f"contains {images:,} images but no class folders"
    raise DataError(f"{folder} {reason}; expected a folder with one subfolder of images per class")
