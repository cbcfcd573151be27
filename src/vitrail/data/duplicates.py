"""Which pictures are the same, or the same but for another encoding or a slight resize.

Equal bytes have equal digests. For the rest, a picture becomes a difference hash of 64 bits (is
each place of a 9 x 8 thumbnail darker than its right neighbor?), which hardly changes when a
picture is encoded again. Pairs whose hashes are near are compared as thumbnails of 16 x 16, since
unlike pictures on plain ground may have the same hash.

Shapes: n pictures.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

NEAR_BITS = 7  # of 64 that may differ
BANDS = 8  # with 7 bits different, one of 8 bands is the same: no near pair is missed
SIDE = 16  # of the thumbnail that has the last word
NEAR_SHARE = 0.05  # of the contrast, by which two thumbnails may differ in the mean
STEP = 3  # gray levels: less between neighbors is noise
BLANK = 2.0  # gray levels of contrast, below which there is nothing to compare
BLOCK = 2**18  # comparisons at once: bounds the memory


class Print(NamedTuple):
    """What near duplicates are found by."""

    hash: int  # 64 bits
    thumbnail: np.ndarray  # (16, 16), uint8


def print_of(gray: Image.Image) -> Print:
    """The difference hash and the thumbnail of a gray picture."""
    small = np.asarray(gray.resize((9, 8), Image.Resampling.BILINEAR), np.int16)
    bits = small[:, 1:] - small[:, :-1] >= STEP  # (8, 8)
    thumbnail = np.asarray(gray.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    return Print(int.from_bytes(np.packbits(bits).tobytes()), thumbnail)


def contrasts(thumbnails: np.ndarray) -> np.ndarray:
    """Mean distance of the pixels from their mean, in gray levels: (n,)."""
    flat = thumbnails.reshape(-1, SIDE**2).astype(np.float32)
    return np.abs(flat - flat.mean(axis=1, keepdims=True)).mean(axis=1)


def blank(thumbnails: np.ndarray) -> np.ndarray:
    """Which pictures show nothing: (n,)."""
    return contrasts(thumbnails) < BLANK


def equal_groups(digests: np.ndarray) -> list[np.ndarray]:
    """Places of equal rows of (n, 2), two at least in each group, in order of the first."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    changes = np.any(digests[order[1:]] != digests[order[:-1]], axis=1)
    groups = np.split(order, np.flatnonzero(changes) + 1)
    groups = [np.sort(group) for group in groups if len(group) > 1]
    return sorted(groups, key=lambda group: int(group[0]))


def near_pairs(hashes: np.ndarray, thumbnails: np.ndarray) -> list[tuple[int, int, int]]:
    """Each two pictures that look the same, in order, and how many bits of the hash differ."""
    contrast = contrasts(thumbnails)
    drawn = np.flatnonzero(contrast >= BLANK)
    hashes, thumbnails, limits = hashes[drawn], thumbnails[drawn], NEAR_SHARE * contrast[drawn]
    blocks = thumbnails.reshape(-1, 4, SIDE // 4, 4, SIDE // 4).mean(axis=(2, 4)).reshape(-1, 16)
    fine = thumbnails.reshape(-1, SIDE**2)
    means = fine.mean(axis=1, keepdims=True)
    found: dict[tuple[int, int], int] = {}
    for left, right in candidates(hashes):
        for pixels in (means, blocks, fine):  # means cannot differ more than what they are of
            apart = np.abs(pixels[left] - pixels[right].astype(np.float32)).mean(axis=1)
            close = apart <= np.minimum(limits[left], limits[right])
            left, right = left[close], right[close]
        bits = np.bitwise_count(hashes[left] ^ hashes[right]).tolist()
        places = zip(drawn[left].tolist(), drawn[right].tolist(), strict=True)
        found |= zip(places, bits, strict=True)
    return [(*pair, found[pair]) for pair in sorted(found)]


def candidates(hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs, left before right, whose hashes are near; some of them more than once."""
    width = 64 // BANDS
    for band in range(BANDS):
        keys = (hashes >> np.uint64(band * width)) & np.uint64(2**width - 1)
        order = np.argsort(keys, kind="stable")  # so that left is before right in a bucket
        for bucket in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
            step = max(1, BLOCK // max(len(bucket), 1))
            for start in range(0, len(bucket), step):
                rows, rest = bucket[start : start + step], bucket[start:]
                distance = np.bitwise_count(hashes[rows][:, None] ^ hashes[rest][None])
                left, right = np.nonzero(distance <= NEAR_BITS)
                left, right = left[right > left], right[right > left]
                yield rows[left], rest[right]
