"""Mutate checkpoint files and load them, in a process of its own."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as pytest does for its own process

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_models import FAMILIES, VIT, random_model

from fuzzing import hunt, mutate_bytes, run
from vitrail import VitrailError, load, save
from vitrail.checkpoints.files import read_file

pytestmark = pytest.mark.slow

KINDS = (*("bytes",) * 5, "tensors", "tensors", "pickle", "json", "empty")
ADDRESS_SPACE = 6 * 2**30  # torch alone maps some of it


class Trap:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def originals(folder):
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
    file, kind = rng.choice(sorted(files)), rng.choice(KINDS)
    data = file.read_bytes()
    match kind:
        case "bytes":
            kind, data = mutate_bytes(data, [data, b"\0"], rng)
        case "empty":
            data = b""
        case "pickle":
            data = pickle.dumps({"head.weight": Trap(mark)})
        case "json" if file.suffix == ".json":
            data = json.dumps(broken_json(json.loads(data), rng)).encode()
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


def main(count, folder):
    sources, mark = folder / "sources", folder / "mark"
    sources.mkdir()
    paths = originals(sources)

    def attempt(number, rng, about):
        source = paths[number % len(paths)]
        target = folder / source.name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        try:
            about.append(mutate(target, rng, mark))
            model = load(target, log=lambda line: None)
        except VitrailError as error:
            if len(str(error).splitlines()) != 1:
                raise AssertionError(f"not one line: {error}") from error
            return False
        finally:
            assert not mark.exists(), "code was run"
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        return all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())

    hunt(count, attempt, address_space=ADDRESS_SPACE)


def test_mutated_files_load_or_raise_one_line(tmp_path):
    assert run(Path(__file__), 2000, tmp_path)["peak_mib"] < 2048


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
