"""Decode mutated image files; run by `test_decode.py`."""

import sys
import warnings
import zlib
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as pytest does for its own process

import numpy as np
from odd_images import bombs, odd_images

from fuzzing import hunt, mutate_bytes
from vitrail.data.decode import open_image
from vitrail.errors import DataError

ADDRESS_SPACE = 4 * 2**30  # numpy alone maps some of it


def mutate(data, others, rng):
    """Mutate a file, and often correct the checksums of a PNG; return the kind, and the file."""
    kind, data = mutate_bytes(data, others, rng)
    if rng.random() < 0.7:
        mend_checksums(data)
    return kind, bytes(data)


def mend_checksums(data):
    """Correct the checksums of a mutated PNG, so that decoding gets past them."""
    at = 8
    while data.startswith(b"\x89PNG") and at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4])
        if end + 4 > len(data):
            return
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4)
        at = end + 4


def decode_once(data, rng):
    """Decode a file and check the pixels; return whether there were any."""
    try:
        image = open_image(data)
        channels = rng.choice([1, 3])
        least = rng.choice([None, (8, 8), (20, 20)])
        backend = rng.choice(["auto", "fast", "pillow"])
        rows = rng.choice([None, 9])
        pixels = image.pixels(channels=channels, min_size=least, max_rows=rows, backend=backend)
    except DataError as error:
        reason = str(error)
        if len(reason.splitlines()) != 1 or not reason.isascii():
            raise AssertionError(f"not one plain line: {reason}") from error
        return False
    full = (image.height, image.width)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert pixels.shape[2] == channels
    least = (2 if rows else 8), 8  # nine rows at an eighth are two
    assert pixels.shape[:2] == full or all(
        min(side, low) <= got <= side
        for got, side, low in zip(pixels.shape, full, least, strict=False)
    )
    return True


def main(count):
    sources = {name: odd.data for name, odd in odd_images().items()} | dict(bombs())
    sources = {name: data for name, data in sources.items() if len(data) < 50_000}
    names, files = list(sources), list(sources.values())
    warned = []
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *place: warned.append(str(message))

    def attempt(number, rng, about):
        name = names[number % len(names)]
        kind, data = mutate(sources[name], files, rng)
        about += [kind, name]
        has_pixels = decode_once(data, rng)
        assert warned == []
        return has_pixels

    hunt(count, attempt, address_space=ADDRESS_SPACE)


if __name__ == "__main__":
    main(int(sys.argv[1]))
