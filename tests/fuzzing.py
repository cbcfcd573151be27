"""Mutate files, and run our code on them in a process of its own with a limited address space.

A script calls `hunt`; a test calls `run` with the path of that script.
"""

import json
import os
import random
import resource
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from vitrail.data.datasets import open_dataset
from vitrail.errors import DataError
from vitrail.planning.request import resident_bytes

KINDS = ("flip", "flip", "cut", "grow", "noise", "number", "number", "splice", "drop", "repeat")
NUMBERS = (0, 1, 2, 127, 255, 256, 32_767, 65_535, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
SLOW = 20.0  # seconds of CPU time for one tiny file: a hang
# A thread for each of 64 cores maps gigabytes, and what may be mapped is limited.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def mutate_bytes(data: bytes, others: list[bytes], rng: random.Random) -> tuple[str, bytearray]:
    """Mutate a file; return the kind of mutation, and the file."""
    kind, data = rng.choice(KINDS), bytearray(data)
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
    return kind, data


def count_rejected(path: Path, count: int, reference: Path | None = None, **options) -> int:
    """Open a dataset with mutated copies of one of its files; return how many were rejected.

    Any exception but a one-line DataError is raised.
    """
    whole, rng, rejected = path.read_bytes(), random.Random(0), 0
    for _ in range(count):
        path.write_bytes(mutate_bytes(whole, [whole], rng)[1])
        path.with_name(f".{path.name}.index.npz").unlink(missing_ok=True)
        try:
            list(open_dataset(reference or path, "all", **options))
        except DataError as error:
            rejected += 1
            if len(str(error).splitlines()) != 1:
                raise AssertionError(f"not one line: {error}") from error
    return rejected


def hunt(
    count: int, attempt: Callable[[int, random.Random, list[str]], bool], *, address_space: int
) -> None:
    """Print as JSON how many attempts succeeded or ended in one of our errors, and what is wrong.

    An attempt appends a description of its input to the list that it gets.
    """
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    outcome = {"accepted": 0, "errors": 0, "wrong": []}
    for number in range(count):
        started, about = time.process_time(), [str(number)]
        try:
            outcome["accepted" if attempt(number, random.Random(number), about) else "errors"] += 1
        except BaseException:
            outcome["wrong"].append(f"{': '.join(about)}: {traceback.format_exc()}")
        if (seconds := time.process_time() - started) > SLOW:
            outcome["wrong"].append(f"{': '.join(about)}: took {seconds:.0f} s")
    outcome["peak_mib"] = resident_bytes("VmHWM") // 2**20  # ru_maxrss has the parent's
    print(json.dumps(outcome))


def run(script: Path, count: int, *arguments: object) -> dict:
    """Run a script that calls `hunt`; assert that nothing was wrong."""
    done = subprocess.run(
        [sys.executable, str(script), str(count), *map(str, arguments)],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["wrong"] == [], "\n".join(outcome["wrong"][:3])
    assert outcome["accepted"] + outcome["errors"] == count
    assert outcome["errors"] > count / 2  # the mutations bite
    return outcome | {"stderr": done.stderr}
