"""The paper's own runs, one list for each experiment: `vitrail reproduce NAME --scale full`.

What the paper does not tell is said in a run's note.
"""

from collections.abc import Callable

from vitrail.reproduction.orders import Order, finetuned, on_imagenet, on_jft, order, slug
from vitrail.reproduction.published import JFT_IMAGES, TABLE6, TABLE8

PARTS = (9e6, 30e6, 90e6, JFT_IMAGES)  # figure 4: random parts of JFT
BASE8 = {"depth": 8, "width": 1024, "mlp_width": 2048, "patch_size": 32}  # appendix D.2
HEAD_WIDTH = 64  # channels of an attention head in ViT-B and ViT-L


def table2() -> list[Order]:
    large = order("ViT-L/16 on ImageNet-21k", "paper-imagenet21k-vit-l16", "ImageNet-21k")
    models = (on_jft("ViT-H/14"), on_jft("ViT-L/16"), large)
    return [*models, *(finetuned(m, size=518 if "H/14" in m.label else 512) for m in models)]


def table8() -> list[Order]:
    return [
        order(
            f"ViT-B/16 on JFT, position {position}, {place}",
            "paper-jft-vit-b16",
            model={"position": position, "position_place": place},
            note="judged by 5-shot accuracy on ImageNet",
        )
        for position, place in TABLE8
    ]


def vits_by_set() -> list[Order]:
    """The pre-trainings of table 5."""
    sizes = ("ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16")
    small = [
        order(f"{model} on {data}", f"paper-{data.lower().replace('-', '')}-{slug(model)}", data)
        for data in ("ImageNet", "ImageNet-21k")
        for model in sizes
    ]
    huge = order(
        "ViT-H/14 on ImageNet-21k",
        "paper-imagenet21k-vit-l16",
        "ImageNet-21k",
        model={"name": "ViT-H/14", "representation": 1280},
        note="table 3 has no row for it: the settings of ViT-L/16",
    )
    return [*small, huge, *(on_jft(model) for model in (*sizes, "ViT-H/14"))]


def bits_by_set() -> list[Order]:
    """ResNets on the same sets; which ones bound the shaded area of figure 3 is not told."""
    note = "after BiT's authors (big_vision, bit_i1k.py and bit_i21k.py), not in this paper"
    common = {"kind": "sgd", "schedule": "cosine", "weight_decay": 1e-4, "betas": None}
    found = []
    for name in ("BiT-R50x1", "BiT-R152x2"):
        model = {"name": name, "dropout": None}
        first = common | {"learning_rate": 1.6, "warmup_steps": 1000}
        second = common | {"learning_rate": 0.48, "warmup_steps": 5000, "end": 0.0}
        second["clip_norm"] = 1.0
        changes = {"model": model, "epochs": 90.0, "note": note}
        found += [
            order(f"{name} on ImageNet", "paper-imagenet", "ImageNet", optim=first, **changes),
            order(
                f"{name} on ImageNet-21k",
                "paper-imagenet21k",
                "ImageNet-21k",
                optim=second,
                **changes,
            ),
            on_jft(name),
        ]
    return found


def table5() -> list[Order]:
    return [run for before in vits_by_set() for run in (before, on_imagenet(before))]


def figure3() -> list[Order]:
    return [*table5(), *(r for before in bits_by_set() for r in (before, on_imagenet(before)))]


def figure4() -> list[Order]:
    """The same number of steps on every part: that of 7 epochs of all."""
    halved = {"width": 384, "mlp_width": 1536, "heads": 6, "representation": 384}
    models = {
        "ViT-b/32 (B halved)": ("paper-jft-vit-b32", halved),
        **{
            name: (f"paper-jft-{slug(name)}", {})
            for name in ("ViT-B/32", "ViT-L/32", "ViT-L/16", "BiT-R50x1", "BiT-R152x2")
        },
    }
    steps = on_jft("ViT-B/32").steps
    note = "a random part; not told whether steps or epochs stay; the best evaluation counts"
    return [
        order(
            f"{name}, {part / 1e6:.0f}M of JFT",
            recipe,
            part=part,
            model=model,
            steps=steps,
            note="" if part == JFT_IMAGES else note,
        )
        for name, (recipe, model) in models.items()
        for part in PARTS
    ]


def figure5() -> list[Order]:
    return [on_jft(row.model, row.epochs) for row in TABLE6]


def figure8() -> list[Order]:
    """Each dimension of the base by itself, and all together."""
    axes: dict[str, list[dict[str, int]]] = {
        "base": [{}],
        "depth": [{"depth": depth} for depth in (4, 16, 32, 64)],
        "width": [{"width": width} for width in (512, 2048)],
        "MLP": [{"mlp_width": width} for width in (1024, 4096, 8192)],
        "patch": [{"patch_size": patch} for patch in (56, 16)],
        "all": [
            {"depth": 4, "width": 512, "mlp_width": 1024, "patch_size": 56},
            {"depth": 16, "width": 2048, "mlp_width": 4096, "patch_size": 16},
        ],
    }
    note = "told: the base, and depths up to 64; heads, other values and the recipe are ours"
    found = []
    for axis, changes in axes.items():
        for change in changes:
            shape = BASE8 | change
            width = shape["width"]
            model = shape | {"heads": width // HEAD_WIDTH, "representation": width}
            told = ", ".join(f"{name.replace('_', ' ')} {x}" for name, x in change.items())
            label = f"figure 8, all: {told}" if axis == "all" else f"figure 8, {told or axis}"
            found.append(order(label, "paper-jft-vit-b32", model=model, note=note))
    return found


def heads() -> list[Order]:
    return [
        order(
            f"ViT-B/16 on JFT, {what}, rate {rate:g}",
            "paper-jft-vit-b16",
            model={"pool": pool},
            optim={"learning_rate": rate},
        )
        for what, pool, rate in (
            ("class token", "cls", 8e-4),
            ("mean of the patches", "mean", 8e-4),
            ("mean of the patches", "mean", 3e-4),
        )
    ]


def transfer() -> list[Order]:
    before = on_jft("ViT-L/16")
    scratch = order("ViT-L/16 on ImageNet", "paper-imagenet-vit-l16", "ImageNet")
    targets = ("ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers-102")
    carried = [finetuned(before, data) for data in targets]
    return [before, *carried, finetuned(before, size=512), scratch, finetuned(scratch)]


def selfsupervised() -> list[Order]:
    masked = order("ViT-B/16, masked patches of JFT", "masked-patches-b16")
    scratch = order("ViT-B/16 on ImageNet", "paper-imagenet-vit-b16", "ImageNet")
    models = (masked, on_jft("ViT-B/16"), scratch)
    return [*models, *(finetuned(model) for model in models)]


def figure10() -> list[Order]:
    other = order(
        "ViT-L/16 on JFT, 7 epochs, rate 0.0002, decay 0.01",
        "paper-jft-vit-l16",
        epochs=7.0,
        optim={"learning_rate": 2e-4, "weight_decay": 0.01},
    )
    return [other, on_jft("ViT-L/16", 7), on_jft("ViT-L/16", 14)]


ORDERS: dict[str, Callable[[], list[Order]]] = {
    "table2": table2,
    "table5": table5,
    "table6": figure5,
    "table8": table8,
    "figure3": figure3,
    "figure4": figure4,
    "figure5": figure5,
    "figure6": lambda: [on_jft("ViT-L/16")],
    "figure7": lambda: [on_jft("ViT-L/32"), on_jft("ViT-L/16")],
    "figure8": figure8,
    "figure10": figure10,
    "figure11": lambda: [on_jft("ViT-L/16"), on_jft("R50+ViT-L/16")],
    "heads": heads,
    "transfer": transfer,
    "selfsupervised": selfsupervised,
}
