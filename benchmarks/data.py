"""From JPEG files to training batches, beside torchvision and timm: images per second."""

import io
import statistics
import tarfile
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from PIL import Image

from peers import make_torchvision_importable
from race_sets import data_folder
from timing import claim, interleave
from vitrail.data import decode
from vitrail.data.augment import rand_augment
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Augmentation, preset
from vitrail.data.transforms import TrainTransform, normalize

FLOWERS = data_folder() / "flowers5_160.tar"
CASES = {"500 x 375": ((500, 375), 120), "2000 x 1500": ((2000, 1500), 24)}
ROUNDS = 15
BATCH = 24


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    if not FLOWERS.exists():
        return f"## Data\n\nNot measured: {FLOWERS} is not there; try `make bench DATA=folder`.\n"
    make_torchvision_importable()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = [
            "## Data",
            "",
            "Decode, random resized crop to 224, flip, batch, normalize: one process, one thread,",
            "enlarged flower photographs as JPEG (quality 90), batches of 24. Interleaved,",
            f"{ROUNDS} rounds. *Ratio* is vitrail's rate divided by the other's, the median over",
            "rounds. torchvision and timm have their usual transforms; timm's second row is what",
            "its prefetching loader does: bytes, its own collation, the batch normalized after it.",
            "vitrail's second row is without simplejpeg, which is in the extra `fast`.",
            "",
        ]
        for title, (size, count) in CASES.items():
            print(f"  {title}", flush=True)
            lines += [f"### {title} JPEG", "", *pipelines(title, size, count), ""]
        print("  RandAugment", flush=True)
        lines += ["### RandAugment at 224, two operations of magnitude 9", "", *augmentations(), ""]
        return "\n".join(lines)
    finally:
        torch.set_num_threads(threads)


def photographs(size: tuple[int, int], count: int) -> list[bytes]:
    """Real images, enlarged and encoded again."""
    found = []
    with tarfile.open(FLOWERS) as archive:
        for member in archive:
            if member.name.endswith(".jpg") and len(found) < count:
                image = Image.open(archive.extractfile(member)).convert("RGB")
                buffer = io.BytesIO()
                image.resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
                found.append(buffer.getvalue())
    return found


def pipelines(title: str, size: tuple[int, int], count: int) -> list[str]:
    files = photographs(size, count)
    return rows(
        f"Training images per second, {title} JPEG",
        {
            "vitrail": ours(files),
            "vitrail, without simplejpeg": without_simplejpeg(ours(files)),
            "torchvision": theirs(files, torchvision_transform()),
            "timm": theirs(files, timm_transform(bytes_out=False)),
            "timm, prefetching": theirs(files, timm_transform(bytes_out=True), late=True),
        },
        count,
    )


def ours(files: list[bytes]) -> Callable[[], object]:
    how = preset("torchvision", (224, 224))
    transform = TrainTransform(preprocessing=how, augmentation=Augmentation(crop_area=(0.08, 1)))

    def call() -> None:
        rng = np.random.default_rng(0)
        for part in in_batches(files):
            normalize(torch.stack([transform(data, rng) for data in part]), how)

    return call


def without_simplejpeg(call: Callable[[], object]) -> Callable[[], object]:
    def with_pillow() -> None:
        with mock.patch.object(decode, "load_simplejpeg", return_value=None):
            call()

    return with_pillow


def theirs(
    files: list[bytes], transform: Callable[[Image.Image], torch.Tensor], *, late: bool = False
) -> Callable[[], object]:
    from timm.data.loader import fast_collate

    mean, std = (255 * torch.tensor(v)[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))

    def call() -> None:
        torch.manual_seed(0)
        for part in in_batches(files):
            images = [transform(Image.open(io.BytesIO(data)).convert("RGB")) for data in part]
            if late:  # what timm's PrefetchLoader does with a batch of bytes
                batch, _ = fast_collate([(image, 0) for image in images])
                batch.float().sub_(mean).div_(std)
            else:
                torch.stack(images)

    return call


def in_batches(files: list[bytes]) -> list[list[bytes]]:
    return [files[start : start + BATCH] for start in range(0, len(files), BATCH)]


def torchvision_transform() -> Callable[[Image.Image], torch.Tensor]:
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def timm_transform(*, bytes_out: bool) -> Callable[[Image.Image], torch.Tensor]:
    from timm.data import create_transform

    return create_transform(
        224, is_training=True, color_jitter=None, auto_augment=None, use_prefetcher=bytes_out
    )


def augmentations() -> list[str]:
    from timm.data.auto_augment import rand_augment_transform

    images = [
        Image.open(io.BytesIO(data)).resize((224, 224)) for data in photographs((256, 256), 100)
    ]
    timm = rand_augment_transform("rand-m9-n2", {"translate_const": 100})

    def our_call() -> None:
        rng = np.random.default_rng(0)
        for image in images:
            rand_augment(image, rng, count=2, magnitude=9)

    calls = {"vitrail": our_call, "timm": lambda: [timm(image) for image in images]}
    return rows("RandAugment, images per second", calls, len(images))


def rows(what: str, calls: dict[str, Callable[[], object]], count: int) -> list[str]:
    seconds = interleave(calls, rounds=ROUNDS)
    lines = ["| pipeline | images / s | ratio |", "|---|---|---|"]
    ratios = {}
    for name, times in seconds.items():
        pairs = zip(times, seconds["vitrail"], strict=True)
        ratios[name] = statistics.median(t / own for t, own in pairs)
        lines.append(f"| {name} | {count / min(times):.0f} | {ratios[name]:.2f} |")
    peers = [name for name in ratios if not name.startswith("vitrail")]
    peer = min(peers, key=lambda name: ratios[name])
    return [claim(what, f"{ratios[peer]:.2f} times {peer}"), "", *lines]
