"""Mutate checkpoint files and load them; run by `test_mutations.py`.

    python mutations.py FOLDER COUNT

Prints how many ended in a load and how many in one of our errors, and what else happened. It runs
in a process of its own, with an address space that a runaway allocation would hit.
"""

import json
import os
import pickle
import random
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from small_models import FAMILIES, VIT, random_model

from vitrail import VitrailError, load, save
from vitrail.checkpoints.files import read_file
from vitrail.planning.request import resident_bytes

KINDS = ("flip", "flip", "cut", "grow", "noise", "tensors", "tensors", "pickle", "json", "empty")
ADDRESS_SPACE = 6 * 2**30  # torch alone maps some of it
SLOW = 20.0  # seconds of CPU time for one tiny file: a hang


class Trap:
    """A pickle that creates a folder if its code is run."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def originals(folder):
    """Write one file or folder per format."""
    vit = random_model(VIT)
    save(vit, folder / "bundle", class_names=["a", "b", "c"])
    save(vit, folder / "google.npz", "google")
    save(random_model(FAMILIES["bit"]), folder / "bit.npz", "google")
    save(random_model(FAMILIES["mixer"]), folder / "mixer.npz", "google")
    wide = random_model(VIT.change(width=64, heads=1, numerics="timm"))
    save(wide, folder / "timm.safetensors", "timm")
    save(wide, folder / "timm.pth", "timm")
    save(wide, folder / "torchvision.pth", "torchvision")
    save(vit, folder / "huggingface", "huggingface")
    np.savez_compressed(folder / "packed.npz", **dict(np.load(folder / "google.npz")))
    return sorted(path for path in folder.iterdir())


def mutate(path, rng, mark):
    """Mutate a checkpoint in place; return a description."""
    files = [path] if path.is_file() else [p for p in path.iterdir() if p.name != "README.md"]
    file = rng.choice(sorted(files))
    kind = rng.choice(KINDS)
    data = bytearray(file.read_bytes())
    match kind:
        case "flip":
            for _ in range(rng.randint(1, 4)):  # near the front or the end, where structure is
                span = rng.choice([200, 2000, len(data)])
                place = rng.randrange(min(span, len(data)))
                data[place if rng.random() < 0.5 else -1 - place] ^= 1 << rng.randrange(8)
        case "cut":
            del data[rng.randrange(len(data)) :]
        case "grow":
            data += rng.randbytes(rng.randint(1, 2000))
        case "noise":
            start = rng.randrange(len(data))
            data[start : start + 64] = rng.randbytes(len(data[start : start + 64]))
        case "empty":
            data = bytearray()
        case "pickle":
            data = bytearray(pickle.dumps({"head.weight": Trap(mark)}))
        case "json" if file.suffix == ".json":
            data = bytearray(json.dumps(broken_json(json.loads(data), rng)).encode())
        case "tensors" if file.suffix != ".json":
            change_tensors(file, rng)
            return f"{kind} {file.name}"
    file.write_bytes(data)
    return f"{kind} {file.name}"


def broken_json(values, rng):
    """Remove one value, or replace it by one of another type or an absurd one."""
    node = values
    while True:
        if not isinstance(node, dict | list) or not node:
            return values
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if isinstance(node[key], dict | list) and rng.random() < 0.7:
            node = node[key]
            continue
        if rng.random() < 0.3 and isinstance(node, dict):
            del node[key]
        else:
            node[key] = rng.choice([None, -1, 0, 10**9, 1e-3, "x", [], {}, [1, 2, 3], True])
        return values


def change_tensors(file, rng):
    """Write a valid file with wrong shapes, dtypes or names."""
    weights = read_file(file)
    tensors = {name: entry.read().clone() for name, entry in weights.tensors.items()}
    name = rng.choice(sorted(tensors))
    match rng.choice(["missing", "extra", "shape", "type", "transpose", "rename"]):
        case "missing":
            del tensors[name]
        case "extra":
            tensors[name + "x"] = torch.zeros(3)
        case "shape":
            tensors[name] = torch.zeros([rng.choice([0, 1, 2, 7, 256]) for _ in range(3)])
        case "type":
            tensors[name] = tensors[name].to(rng.choice([torch.int8, torch.bool, torch.int64]))
        case "transpose":
            tensors[name] = (
                tensors[name].mT.contiguous() if tensors[name].ndim > 1 else tensors[name]
            )
        case "rename":
            tensors[name[::-1]] = tensors.pop(name)
    if file.suffix == ".npz":
        np.savez(file, **{n: t.numpy() for n, t in tensors.items()})
    elif file.suffix == ".safetensors":
        metadata = {k: v for k, v in weights.settings.items() if isinstance(v, str)}
        save_file(tensors, file, metadata)
    else:
        torch.save(tensors, file)


def main(folder, count):
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    sources = folder / "sources"
    sources.mkdir()
    paths = originals(sources)
    outcome = {"loads": 0, "errors": 0, "wrong": []}
    for number in range(count):
        rng = random.Random(number)
        source = paths[number % len(paths)]
        target, mark = folder / source.name, folder / "mark"
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        what = mutate(target, rng, mark)
        started = time.process_time()
        try:
            model = load(target, log=lambda line: None)
            assert all(
                p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()
            )
            outcome["loads"] += 1
        except VitrailError as error:
            outcome["errors"] += 1
            if "\n" in str(error) or not str(error):
                outcome["wrong"].append(f"{number}: {what}: not one line: {error}")
        except BaseException:
            outcome["wrong"].append(f"{number}: {what}: {traceback.format_exc()}")
        if mark.exists():
            outcome["wrong"].append(f"{number}: {what}: code was run")
            mark.rmdir()
        if time.process_time() - started > SLOW:
            outcome["wrong"].append(f"{number}: {what}: took {time.process_time() - started:.0f} s")
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    outcome["peak_mib"] = resident_bytes("VmHWM") // 2**20  # ru_maxrss has the parent's
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
