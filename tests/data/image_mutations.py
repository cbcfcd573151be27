"""Decode mutated image files; run by `test_decode.py`.

    python image_mutations.py COUNT

Prints how many ended in pixels and how many in one of our errors, and what else happened. It runs
in a process of its own, with an address space that a runaway allocation would hit.
"""

import json
import random
import re
import resource
import struct
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path

import numpy as np
from odd_images import bombs, odd_images

from vitrail.data.decode import open_image
from vitrail.errors import DataError

KINDS = ("flip", "flip", "cut", "grow", "noise", "number", "number", "splice", "drop", "repeat")
ADDRESS_SPACE = 4 * 2**30  # numpy alone maps some of it
SLOW = 20.0  # seconds for one tiny file: a hang
NUMBERS = (0, 1, 2, 127, 255, 256, 32_767, 65_535, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def mutate(data, others, rng):
    """Mutate a file; return the kind of mutation, and the file."""
    kind = rng.choice(KINDS)
    data = bytearray(data)
    place = rng.randrange(min(rng.choice([32, 200, 2000, len(data)]), len(data)))
    span = rng.choice([1, 4, 16, 64, 300])
    match kind:
        case "flip":
            for _ in range(rng.randint(1, 4)):  # near the front or the end, where structure is
                data[place if rng.random() < 0.8 else -1 - place] ^= 1 << rng.randrange(8)
                place = rng.randrange(len(data))
        case "cut":
            del data[rng.randrange(len(data)) :]
        case "grow":
            data += rng.randbytes(rng.randint(1, 2000))
        case "noise":
            data[place : place + span] = rng.randbytes(len(data[place : place + span]))
        case "number":
            code = rng.choice(["<H", ">H", "<L", ">L"])
            number = rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(code))
            data[place : place + struct.calcsize(code)] = struct.pack(code, number)
        case "splice":  # the front of this file, and the rest of another
            other = rng.choice(others)
            data[place:] = other[rng.randrange(len(other)) :]
        case "drop":
            del data[place : place + span]
        case "repeat":
            data[place:place] = data[place : place + span]
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


def peak_mib():
    """Return the peak memory of this process; ru_maxrss would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) // 1024


def main(count):
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    outcome = {"pixels": 0, "errors": 0, "slowest": 0.0, "wrong": []}
    sources = {name: odd.data for name, odd in odd_images().items()} | dict(bombs())
    sources = {name: data for name, data in sources.items() if len(data) < 50_000}
    names, files = list(sources), list(sources.values())
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *place: outcome["wrong"].append(f"warned: {message}")
    for number in range(count):
        rng = random.Random(number)
        name = names[number % len(names)]
        kind, data = mutate(sources[name], files, rng)
        started = time.monotonic()
        try:
            outcome["pixels" if decode_once(data, rng) else "errors"] += 1
        except BaseException:
            outcome["wrong"].append(f"{number}: {kind} {name}: {traceback.format_exc()}")
        seconds = time.monotonic() - started
        outcome["slowest"] = max(outcome["slowest"], seconds)
        if seconds > SLOW:
            outcome["wrong"].append(f"{number}: {kind} {name}: took {seconds:.0f} s")
    outcome["peak_mib"] = peak_mib()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(int(sys.argv[1]))
