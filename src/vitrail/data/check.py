"""Check a dataset before training: unreadable files, duplicates, split leaks, class problems.

    report = check_dataset("photos/")
    report.leaks                the same image in two splits
    report.recommendations      what to do

Every image is read and decoded once. Identical files have equal digests. Near duplicates (encoded
again, or slightly resized) are found by a difference hash of 64 bits (is each pixel of a 9 x 8
thumbnail darker than its right neighbor?); pairs of similar hashes are compared as thumbnails of
16 x 16, since different images on a plain background may have the same hash.
"""

import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha1
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.datasets import ImageDataset, LabelSets, open_splits
from vitrail.data.decode import open_image, to_rgb
from vitrail.errors import DataError
from vitrail.formatting import comma_list

WORKERS = 4  # threads: decoding and resizing release the GIL
BATCH = 256  # images in flight
DECODE_SIZE = (128, 128)  # enough to compare images; a JPEG is decoded no larger than needed
MAX_SATURATION = 8  # difference between channels, up to which a pixel counts as gray
SMALL_RATIO = 1 / 3  # of the median short side, below which an image is reported as small
MIN_CLASS_IMAGES = 10  # below which a class can hardly be learned
MAX_IMBALANCE = 10  # ratio of the largest to the smallest class
HASH_BITS = 7  # of 64 that may differ between near duplicates
HASH_BANDS = 8  # if 7 bits differ, at least one of 8 bands is equal: no near pair is missed
THUMBNAIL_SIDE = 16
NEAR_CONTRAST = 0.05  # fraction of the contrast by which thumbnails may differ in the mean
MIN_STEP = 3  # gray levels: less between neighbors is noise
MIN_CONTRAST = 2.0  # gray levels, below which an image is blank
MAX_COMPARISONS = 2**18  # at once: bounds the memory
NO_PROBLEMS = "No problems found in files, duplicates and class sizes."
IMAGE_PROBLEMS = {  # attribute of a report: description and advice, most urgent first
    "leaks": "image{s} in more than one split {kinds}: keep each in one split, or results will be "
    "too optimistic.",
    "unreadable": "unreadable file{s}: repair or delete; in training each is replaced by another "
    "sample.",
    "conflicts": "image{s} with more than one label: decide which is correct, and delete the other "
    "copies.",
    "repeated": "image{s} more than once in a split {kinds}: one copy of each is enough.",
    "blank": "blank image{s} (a single color): check if intended.",
    "small": "image{s} much smaller than the others: check for previews of larger images.",
    "gray": "gray image{s} among color images: harmless, unless gray correlates with some classes.",
}
ARRAY_MODES = {(): "L", (1,): "L", (3,): "RGB"}  # by the shape after rows and columns
IMAGE_STATS = np.dtype(
    [
        ("readable", "?"),
        ("height", "i4"),
        ("width", "i4"),
        ("gray", "?"),
        ("digest", "u8", (2,)),  # of the file, or of the pixels of an array
        ("hash", "u8"),
        ("thumbnail", "u1", (THUMBNAIL_SIDE, THUMBNAIL_SIDE)),
    ]
)


@dataclass(frozen=True, slots=True)
class SampleInfo:
    name: str
    split: str
    labels: tuple[str, ...]
    index: int  # in its split


class UnreadableFile(NamedTuple):
    name: str
    split: str
    reason: str


class DuplicateGroup(NamedTuple):
    """Identical images, or a pair of near duplicates."""

    members: tuple[SampleInfo, ...]
    exact: bool  # identical bytes
    bits: int  # of 64 that differ between the difference hashes

    @property
    def leak(self) -> bool:
        return len({member.split for member in self.members}) > 1

    @property
    def conflict(self) -> bool:
        return len({member.labels for member in self.members}) > 1

    def to_dict(self) -> dict[str, Any]:
        members = [asdict(member) for member in self.members]
        return self._asdict() | {"members": members, "leak": self.leak, "conflict": self.conflict}


class SizeRange(NamedTuple):
    least: int  # pixels
    median: int
    most: int


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    reference: str
    splits: dict[str, int]  # number of images
    counts: dict[str, dict[str, int]]  # class: split: number of images
    notes: tuple[str, ...]  # warnings from opening the dataset
    examined: int  # images that were read: all, unless there was a limit
    height: SizeRange | None  # None: no image is readable
    width: SizeRange | None
    kinds: dict[str, int]  # format and mode: number of images
    unreadable: tuple[UnreadableFile, ...]
    duplicates: tuple[DuplicateGroup, ...]  # identical bytes
    near_duplicates: tuple[DuplicateGroup, ...]
    small: tuple[SampleInfo, ...]  # much smaller than the others
    gray: tuple[SampleInfo, ...]  # gray among mostly color images
    blank: tuple[SampleInfo, ...]  # of a single color

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def images(self) -> int:
        return sum(self.splits.values())

    @property
    def leaks(self) -> tuple[DuplicateGroup, ...]:
        """The same image in more than one split; exact duplicates first."""
        return tuple(group for group in self.duplicates + self.near_duplicates if group.leak)

    @property
    def conflicts(self) -> tuple[DuplicateGroup, ...]:
        """The same image with different labels."""
        return tuple(group for group in self.duplicates + self.near_duplicates if group.conflict)

    @property
    def repeated(self) -> tuple[DuplicateGroup, ...]:
        """The same image more than once in a split, with the same label."""
        groups = self.duplicates + self.near_duplicates
        return tuple(group for group in groups if not (group.leak or group.conflict))

    @cached_property
    def recommendations(self) -> tuple[str, ...]:
        """What to do, most urgent first."""
        lines = []
        for name, text in IMAGE_PROBLEMS.items():
            if items := getattr(self, name):
                exact = sum(getattr(item, "exact", False) for item in items)
                kinds = f"({exact:,} exact, {len(items) - exact:,} near duplicates)"
                text = text.format(s="s" if len(items) > 1 else "", kinds=kinds)
                lines.append(f"{len(items):,} {text}")
        lines = [*lines, *class_problems(self)] or [NO_PROBLEMS]
        if self.examined < self.images:
            lines.append(
                f"Only {self.examined:,} of {self.images:,} images were checked; run without a "
                "limit to check the rest."
            )
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types. The keys are part of `vitrail check --json`."""
        lists = ("small", "gray", "blank")
        groups = ("leaks", "conflicts", "duplicates", "near_duplicates")
        return {
            "reference": self.reference,
            "pictures": self.images,
            "examined": self.examined,
            "verdict": list(self.recommendations),
            "splits": self.splits,
            "counts": self.counts,
            "notes": list(self.notes),
            "kinds": self.kinds,
            "height": self.height and self.height._asdict(),
            "width": self.width and self.width._asdict(),
            "unreadable": [file._asdict() for file in self.unreadable],
            **{name: [asdict(item) for item in getattr(self, name)] for name in lists},
            **{name: [group.to_dict() for group in getattr(self, name)] for name in groups},
        }


def check_dataset(
    reference: str | os.PathLike[str],
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetReport:
    """Check every image of every split, or `limit` of them, evenly spaced.

    `progress` is called with the number of images done and the total.
    """
    datasets = open_splits(reference)
    locations = [(split, i) for split, part in datasets.items() for i in range(len(part))]
    if limit is not None and limit < len(locations):
        chosen = np.linspace(0, len(locations) - 1, max(limit, 1))
        locations = [locations[int(position)] for position in chosen]
    stats, kinds, unreadable = read_images(datasets, locations, progress)
    readable = np.flatnonzero(stats["readable"])
    stats, locations = stats[readable], [locations[row] for row in readable]
    labels = {split: part.labels() for split, part in datasets.items()}

    def infos(rows: Iterable[int]) -> tuple[SampleInfo, ...]:
        samples = []
        for split, index in (locations[row] for row in rows):
            part, label = datasets[split], labels[split][index]
            ids = label if isinstance(label, tuple) else (int(label),)
            names = tuple(part.classes[number] for number in ids)
            samples.append(SampleInfo(part.name(index), split, names, index))
        return tuple(samples)

    classes = dict.fromkeys(chain.from_iterable(part.classes for part in datasets.values()))
    counts = {name: dict.fromkeys(datasets, 0) for name in classes}
    for split, values in labels.items():  # a multi-label image counts for each of its classes
        ids = values.classes if isinstance(values, LabelSets) else values
        for number, count in enumerate(np.bincount(ids).tolist()):
            counts[datasets[split].classes[number]][split] += count
    identical: dict[bytes, list[int]] = defaultdict(list)
    for row, digest in enumerate(stats["digest"]):
        identical[digest.tobytes()].append(row)
    first = [rows[0] for rows in identical.values()]  # only these are compared with others
    near = near_pairs(stats["hash"][first], stats["thumbnail"][first])
    sides = {
        side: SizeRange(int(stats[side].min()), int(np.median(stats[side])), int(stats[side].max()))
        for side in (("height", "width") if len(stats) else ())
    }
    short, gray = np.minimum(stats["height"], stats["width"]), stats["gray"]
    mostly_color = 2 * np.count_nonzero(gray) < len(gray)
    return DatasetReport(
        reference=os.fspath(reference),
        splits={split: len(part) for split, part in datasets.items()},
        counts=counts,
        notes=tuple(dict.fromkeys(chain.from_iterable(p.notes for p in datasets.values()))),
        examined=len(stats) + len(unreadable),
        height=sides.get("height"),
        width=sides.get("width"),
        kinds=dict(kinds.most_common()),
        unreadable=tuple(unreadable),
        duplicates=tuple(
            DuplicateGroup(infos(rows), exact=True, bits=0)
            for rows in identical.values()
            if len(rows) > 1
        ),
        near_duplicates=tuple(
            DuplicateGroup(infos([first[left], first[right]]), exact=False, bits=bits)
            for left, right, bits in near
        ),
        small=infos(np.flatnonzero(short < SMALL_RATIO * np.median(short))) if len(short) else (),
        gray=infos(np.flatnonzero(gray)) if mostly_color else (),
        blank=infos(np.flatnonzero(contrasts(stats["thumbnail"]) < MIN_CONTRAST)),
    )


def read_images(
    datasets: dict[str, ImageDataset],
    locations: Sequence[tuple[str, int]],
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, Counter[str], list[UnreadableFile]]:
    """Return `IMAGE_STATS` of each image, counts of format and mode, and unreadable files."""
    stats = np.zeros(len(locations), IMAGE_STATS)
    kinds, unreadable, pending = Counter[str](), [], deque[Future[tuple[tuple[Any, ...], str]]]()
    with ThreadPoolExecutor(WORKERS) as pool:
        for row, (split, index) in enumerate(locations):
            if not pending:  # never more than a batch ahead
                for name, i in locations[row : row + BATCH]:
                    pending.append(pool.submit(image_stats, datasets[name], i))
            try:
                stats[row], kind = pending.popleft().result()
                kinds[kind] += 1
            except DataError as error:
                name = datasets[split].name(index)
                unreadable.append(UnreadableFile(name, split, str(error)))
            if progress is not None:
                progress(row + 1, len(locations))
    return stats, kinds, unreadable


def image_stats(dataset: ImageDataset, index: int) -> tuple[tuple[Any, ...], str]:
    """Return a row of `IMAGE_STATS`, and format and mode; `DataError` if decoding fails."""
    data = dataset[index].data
    if isinstance(data, np.ndarray):
        digest = sha1(data.tobytes())
        digest.update(f"{data.shape}".encode())
        (height, width), pixels = data.shape[:2], data
        kind = f"array {ARRAY_MODES.get(data.shape[2:], f'of {data.shape[-1]} channels')}"
    else:
        digest = sha1(data)
        encoded = open_image(data)
        height, width, kind = encoded.height, encoded.width, f"{encoded.format} {encoded.mode}"
        pixels = encoded.pixels(min_size=DECODE_SIZE)
    image = Image.fromarray(to_rgb(pixels))
    side = (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
    colors = np.asarray(image.resize(side, Image.Resampling.BILINEAR))
    is_gray = bool((np.ptp(colors, axis=2) <= MAX_SATURATION).all())
    gray = image.convert("L")
    small = np.asarray(gray.resize((9, 8), Image.Resampling.BILINEAR), np.int16)
    bits = np.packbits(small[:, 1:] - small[:, :-1] >= MIN_STEP)  # of (8, 8)
    thumbnail = np.asarray(gray.resize(side, Image.Resampling.BILINEAR))
    halves = np.frombuffer(digest.digest()[:16], np.uint64)
    hash = int.from_bytes(bits.tobytes())
    return (True, height, width, is_gray, halves, hash, thumbnail), kind


# Duplicates. Shapes: n images.


def contrasts(thumbnails: np.ndarray) -> np.ndarray:
    """Return the mean absolute deviation of each thumbnail in gray levels: (n,)."""
    flat = thumbnails.reshape(-1, THUMBNAIL_SIDE**2).astype(np.float32)
    return np.abs(flat - flat.mean(axis=1, keepdims=True)).mean(axis=1)


def near_pairs(hashes: np.ndarray, thumbnails: np.ndarray) -> list[tuple[int, int, int]]:
    """Return pairs of near duplicates in order, and the number of different hash bits."""
    contrast = contrasts(thumbnails)
    rows = np.flatnonzero(contrast >= MIN_CONTRAST)
    hashes, thumbnails, limits = hashes[rows], thumbnails[rows], NEAR_CONTRAST * contrast[rows]
    quarter = THUMBNAIL_SIDE // 4
    blocks = thumbnails.reshape(-1, 4, quarter, 4, quarter).mean(axis=(2, 4)).reshape(-1, 16)
    fine = thumbnails.reshape(-1, THUMBNAIL_SIDE**2)
    means = fine.mean(axis=1, keepdims=True)
    pairs: dict[tuple[int, int], int] = {}
    width = 64 // HASH_BANDS
    for band in range(HASH_BANDS):  # only hashes that are equal in some band are compared
        keys = (hashes >> np.uint64(band * width)) & np.uint64(2**width - 1)
        order = np.argsort(keys, kind="stable")  # left before right within a bucket
        for bucket in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
            step = max(1, MAX_COMPARISONS // max(len(bucket), 1))
            for start in range(0, len(bucket), step):
                some, rest = bucket[start : start + step], bucket[start:]
                different = np.bitwise_count(hashes[some][:, None] ^ hashes[rest][None])
                left, right = np.nonzero(different <= HASH_BITS)
                left, right = some[left[right > left]], rest[right[right > left]]
                for pixels in (means, blocks, fine):  # coarse to fine: most pairs fail early
                    distance = np.abs(pixels[left] - pixels[right].astype(np.float32)).mean(axis=1)
                    close = distance <= np.minimum(limits[left], limits[right])
                    left, right = left[close], right[close]
                bits = np.bitwise_count(hashes[left] ^ hashes[right]).tolist()
                indices = zip(rows[left].tolist(), rows[right].tolist(), strict=True)
                pairs |= zip(indices, bits, strict=True)
    return [(*pair, pairs[pair]) for pair in sorted(pairs)]


# Recommendations.


def class_problems(report: DatasetReport) -> Iterator[str]:
    def named(names: Sequence[str]) -> str:
        """Return `Classes 'a' and 'b'`, or the first of them and how many more."""
        if len(names) == 2:
            return f"Classes {names[0]!r} and {names[1]!r}"
        return f"Class{'es' if len(names) > 1 else ''} {comma_list(names, 3, quoted=True)}"

    if len(report.classes) == 1:
        yield f"One class, {report.classes[0]!r}: classification needs two or more classes."
    totals = {name: sum(counts.values()) for name, counts in report.counts.items()}
    spellings: dict[str, list[str]] = defaultdict(list)
    for name in report.classes:
        spellings["".join(name.casefold().split())].append(name)
    for names in spellings.values():
        if len(names) > 1:
            yield f"{named(names)} differ only in case or spaces: merge them."
    if empty := [name for name, count in totals.items() if not count]:
        yield f"{named(empty)} without images: delete, or add images."
    for split in report.splits if len(report.splits) > 1 else ():
        missing = [n for n, counts in report.counts.items() if totals[n] and not counts[split]]
        if missing:
            advice = (
                "cannot be learned; add images or delete the class"
                if split == "train"
                else "results do not cover it; move some images there"
            )
            yield f"{named(missing)} without images in {split}: {advice}."
    if few := [name for name, count in totals.items() if 0 < count < MIN_CLASS_IMAGES]:
        yield f"{named(few)} with fewer than {MIN_CLASS_IMAGES} images: add some, or merge classes."
    least, most = (pick(filter(None, totals.values()), default=0) for pick in (min, max))
    if least and most >= MAX_IMBALANCE * least:
        yield (
            f"Class imbalance: the largest class has {most / least:.0f} times as many images as "
            "the smallest; compare accuracy per class."
        )
