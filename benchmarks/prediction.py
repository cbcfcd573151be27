"""Inference on a folder of photographs and on single images, against timm and transformers.

All have the same weights. Each library prepares images as it usually does for such a model, and
each is measured with the batches and helpers that suit it best of those tried.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import vitrail
from data import FLOWERS, photographs
from peers import LIBRARIES, Shape, make_torchvision_importable
from timing import claim, interleave, spread
from vitrail.data.preprocessing import preset
from vitrail.prediction.engines import AccuracyGuard
from vitrail.prediction.predictor import Predictor

IMAGES = 1000
ROUNDS = 4  # each looks at a quarter of the images in turn
SIZE = (500, 375)
SMALL = Shape(224, 16, 384, 12, 6, 1536, 1000)
ONE_ROUNDS = 25
ANY_LOSS = AccuracyGuard(max_drop=1.0)  # random weights have no accuracy to lose


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    if not FLOWERS.exists():
        return f"## Prediction\n\nNot measured: {FLOWERS} is not there.\n"
    make_torchvision_importable()
    with tempfile.TemporaryDirectory() as root:
        print("  a folder", flush=True)
        folder = folder_of_images(Path(root))
        print("  one image", flush=True)
        single = one_image()
    return "\n".join(["## Prediction", "", *folder, "", *single, ""])


def folder_of_images(root: Path) -> list[str]:
    """ViT-Ti/16 on photographs in files."""
    paths = written(root / "images")
    model = random_model("ViT-Ti/16")
    vitrail.save(model, root / "hf", "huggingface")
    vitrail.save(model, root / "timm", "timm")
    calls = {f"vitrail, {e}": ours(model, e) for e in ("torch", "onnx", "onnx-int8")}
    calls |= {f"timm, batches of {b}, {w} workers": by_timm(root, b, w) for b, w in TIMM}
    calls |= {f"transformers, batches of {b}": by_transformers(root, b) for b in (1, 16)}
    for call in calls.values():
        call(paths[:16])
    rates: dict[str, list[float]] = {name: [] for name in calls}
    share = len(paths) // ROUNDS
    for turn in range(ROUNDS):
        some = paths[turn * share : (turn + 1) * share]
        for name, call in calls.items():
            begun = time.perf_counter()
            answers = call(some)
            rates[name].append(len(some) / (time.perf_counter() - begun))
            assert len(answers) == len(some), name
            print(f"    {name}: {rates[name][-1]:.1f}", flush=True)
    return folder_table(rates)


TIMM = ((32, 0), (32, 2), (256, 2))


def folder_table(rates: dict[str, list[float]]) -> list[str]:
    theirs = [name for name in rates if not name.startswith("vitrail")]
    best = max(theirs, key=lambda name: statistics.median(rates[name]))
    ours = max(rates.keys() - set(theirs), key=lambda name: statistics.median(rates[name]))
    lead = statistics.median(a / b for a, b in zip(rates[ours], rates[best], strict=True))
    rows = [
        f"### A folder of {IMAGES:,} JPEGs of {SIZE[0]} x {SIZE[1]}, ViT-Ti/16 at 224",
        "",
        claim("Images per second from files to classes", f"{ours} {lead:.2f} times {best}"),
        "",
        f"From files to ranked classes, {ROUNDS} interleaved rounds. *Ratio* is the median over",
        f"rounds of the rate divided by that of the fastest peer, {best}.",
        "",
        "| pipeline | images per second, median | ratio |",
        "|---|---|---|",
    ]
    for name, found in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        ratio = statistics.median(a / b for a, b in zip(found, rates[best], strict=True))
        rows.append(f"| {name} | {statistics.median(found):.1f} | {ratio:.2f} |")
    return rows


def one_image() -> list[str]:
    """ViT-S/16, one prepared image: the latency of one request."""
    image = torch.randn(1, 3, 224, 224)
    calls: dict[str, Callable[[], object]] = {}
    for name in ("vitrail", "timm", "transformers", "torchvision"):
        calls[f"{name}, eager"] = eager(LIBRARIES[name](SMALL), image)
    model = random_model("ViT-S/16")
    for name in ("onnx", "onnx-int8"):
        engine = Predictor(model, engine=name, guard=ANY_LOSS).engine
        calls[f"vitrail, {name}"] = lambda engine=engine: engine(image)
    seconds = interleave(calls, rounds=ONE_ROUNDS)
    ours = seconds["vitrail, eager"]
    quick = zip(seconds["vitrail, onnx-int8"], ours, strict=True)
    speed = statistics.median(own / t for t, own in quick)
    rows = [
        "### One image, ViT-S/16 at 224",
        "",
        claim("One image, ViT-S/16", f"onnx-int8 {speed:.2f} times as fast as eager torch"),
        "",
        f"The forward pass of a preprocessed image, {ONE_ROUNDS} interleaved rounds. *Speed* is",
        "the median over rounds of the time of vitrail's eager model divided by this one's.",
        "",
        "| what | best, ms | median, ms | speed |",
        "|---|---|---|---|",
    ]
    for name, times in sorted(seconds.items(), key=lambda item: min(item[1])):
        ratio = statistics.median(own / t for t, own in zip(times, ours, strict=True))
        rows.append(f"| {name} | {spread(times)} | {ratio:.2f} |")
    return rows


def eager(model: nn.Module, image: torch.Tensor) -> Callable[[], object]:
    model.eval()

    def call() -> None:
        with torch.inference_mode():
            model(image)

    return call


def random_model(name: str) -> nn.Module:
    """A model with a random head of visible variance, and timm's preprocessing."""
    torch.manual_seed(0)
    model = vitrail.create(name, num_classes=1000, numerics=vitrail.NUMERICS["timm"])
    nn.init.normal_(model.head.weight, std=0.1)
    names = [f"class {number}" for number in range(1000)]
    preprocessing = preset("timm", (224, 224))
    model.metadata = vitrail.Metadata(preprocessing=preprocessing, class_names=tuple(names))
    return model.eval()


def written(folder: Path) -> list[Path]:
    """The photographs as files, in one folder of a class, as timm wants it."""
    inside = folder / "flowers"
    inside.mkdir(parents=True)
    paths = []
    for number, data in enumerate(photographs(SIZE, IMAGES)):
        paths.append(inside / f"{number:04d}.jpg")
        paths[-1].write_bytes(data)
    return paths


def ours(model: nn.Module, engine: str) -> Callable[[Sequence[Path]], list[object]]:
    predictor = Predictor(model, engine=engine, guard=ANY_LOSS)
    return lambda paths: list(predictor.stream(paths))


def by_timm(root: Path, batch: int, workers: int) -> Callable[[Sequence[Path]], list[object]]:
    """What timm's inference.py does: its dataset, its loader, top 5 of each batch."""
    import timm
    from timm.data import create_loader, resolve_model_data_config
    from timm.data.dataset import ImageDataset

    settings = json.loads((root / "timm" / "config.json").read_text())
    model = timm.create_model(
        settings["architecture"],
        num_classes=1000,
        checkpoint_path=str(next((root / "timm").glob("*.safetensors"))),
        **settings.get("model_args", {}),
    ).eval()
    config = resolve_model_data_config(model)

    def call(paths: Sequence[Path]) -> list[object]:
        data = ImageDataset(str(root / "images"))
        data.reader.samples = [(str(path), 0) for path in paths]
        loader = create_loader(
            data,
            config["input_size"],
            batch,
            use_prefetcher=False,
            num_workers=workers,
            interpolation=config["interpolation"],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
        )
        found: list[object] = []
        with torch.inference_mode():
            for images, _ in loader:
                best = model(images).softmax(-1).topk(5)
                found += list(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        return found

    return call


def by_transformers(root: Path, batch: int) -> Callable[[Sequence[Path]], list[object]]:
    """Its image-classification pipeline."""
    from transformers import AutoImageProcessor, ViTForImageClassification, pipeline

    ask = pipeline(
        "image-classification",
        model=ViTForImageClassification.from_pretrained(root / "hf"),
        image_processor=AutoImageProcessor.from_pretrained(root / "hf"),
        batch_size=batch,
        device="cpu",
    )
    return lambda paths: ask([str(path) for path in paths], top_k=5)
