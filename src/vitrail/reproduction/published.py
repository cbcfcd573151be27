"""The numbers of the paper, as data: to be compared with, never to be presented as ours.

Dosovitskiy et al. 2021, arXiv:2010.11929, version 2. Accuracies are top-1 in percent, but for
table 8, which the paper gives as shares. Models go by the names of `vitrail models`; the paper's
ResNets are BiT's. What a model was pre-trained on stands in brackets: "ViT-L/16 (JFT)".
This file does not import torch.
"""

from typing import NamedTuple

from vitrail.errors import ConfigError, unknown


class Shape(NamedTuple):
    """A row of table 1."""

    depth: int
    width: int
    mlp_width: int
    heads: int
    parameters: float  # rounded to millions


class Number(NamedTuple):
    """An accuracy, and its standard deviation over three runs of fine-tuning where it is told."""

    value: float
    deviation: float | None = None


class Pretraining(NamedTuple):
    """A row of table 3; batch 4,096, warm-up of 10,000 steps, Adam, 224 pixels."""

    models: tuple[str, ...]
    data: str
    epochs: tuple[int, ...]
    learning_rate: float
    decay: str
    weight_decay: float
    dropout: float


class Finetuning(NamedTuple):
    """A row of table 4; SGD with momentum 0.9, cosine, batch 512, no weight decay, 384 pixels."""

    steps: int
    learning_rates: tuple[float, ...]


class Scaling(NamedTuple):
    """A row of table 6: pre-trained on JFT, then fine-tuned."""

    model: str
    epochs: int
    accuracies: tuple[float, ...]  # of TARGETS
    exaflops: float

    @property
    def family(self) -> str:
        if self.model.startswith("BiT"):
            return "ResNet"
        return "ViT" if self.model.startswith("ViT") else "hybrid"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.epochs} epochs"

    @property
    def average(self) -> float:
        """Over the five target sets; ReaL has the pictures of ImageNet and is left out."""
        five = [x for name, x in zip(TARGETS, self.accuracies, strict=True) if name != REAL]
        return sum(five) / len(five)

    @property
    def imagenet(self) -> float:
        return self.accuracies[TARGETS.index("ImageNet")]


REAL = "ImageNet ReaL"
JFT_IMAGES = 303e6  # section 4.1

TABLE1 = {
    "ViT-Base": Shape(12, 768, 3072, 12, 86e6),
    "ViT-Large": Shape(24, 1024, 4096, 16, 307e6),
    "ViT-Huge": Shape(32, 1280, 5120, 16, 632e6),
}

MODELS2 = (
    "ViT-H/14 (JFT)",
    "ViT-L/16 (JFT)",
    "ViT-L/16 (ImageNet-21k)",
    "BiT-R152x4 (JFT)",
    "Noisy Student (EfficientNet-L2)",
)
H, L, L21, BIT, NOISY = MODELS2
TABLE2: dict[str, dict[str, Number]] = {
    "ImageNet": {
        H: Number(88.55, 0.04),
        L: Number(87.76, 0.03),
        L21: Number(85.30, 0.02),
        BIT: Number(87.54, 0.02),
        NOISY: Number(88.4),  # and 88.5 by a later work
    },
    REAL: {
        H: Number(90.72, 0.05),
        L: Number(90.54, 0.03),
        L21: Number(88.62, 0.05),
        BIT: Number(90.54),
        NOISY: Number(90.55),
    },
    "CIFAR-10": {
        H: Number(99.50, 0.06),
        L: Number(99.42, 0.03),
        L21: Number(99.15, 0.03),
        BIT: Number(99.37, 0.06),
    },
    "CIFAR-100": {
        H: Number(94.55, 0.04),
        L: Number(93.90, 0.05),
        L21: Number(93.25, 0.05),
        BIT: Number(93.51, 0.08),
    },
    "Pets": {
        H: Number(97.56, 0.03),
        L: Number(97.32, 0.11),
        L21: Number(94.67, 0.15),
        BIT: Number(96.62, 0.23),
    },
    "Flowers-102": {
        H: Number(99.68, 0.02),
        L: Number(99.74, 0.00),
        L21: Number(99.61, 0.02),
        BIT: Number(99.63, 0.03),
    },
    "VTAB": {
        H: Number(77.63, 0.23),
        L: Number(76.28, 0.46),
        L21: Number(72.72, 0.21),
        BIT: Number(76.29, 1.70),
    },
}
CORE_DAYS = {H: 2500.0, L: 680.0, L21: 230.0, BIT: 9900.0, NOISY: 12300.0}  # of a TPUv3

TABLE3 = (
    Pretraining(("ViT-B/16", "ViT-B/32"), "JFT", (7,), 8e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-L/32",), "JFT", (7,), 6e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-L/16",), "JFT", (7, 14), 4e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-H/14",), "JFT", (14,), 3e-4, "linear", 0.1, 0.0),
    Pretraining(("BiT-R50x1", "BiT-R50x2"), "JFT", (7,), 1e-3, "linear", 0.1, 0.0),
    Pretraining(("BiT-R101x1",), "JFT", (7,), 8e-4, "linear", 0.1, 0.0),
    Pretraining(("BiT-R152x1", "BiT-R152x2"), "JFT", (7,), 6e-4, "linear", 0.1, 0.0),
    Pretraining(("R50+ViT-B/16", "R50+ViT-B/32"), "JFT", (7,), 8e-4, "linear", 0.1, 0.0),
    Pretraining(("R50+ViT-L/32",), "JFT", (7,), 2e-4, "linear", 0.1, 0.0),
    Pretraining(("R50+ViT-L/16",), "JFT", (7, 14), 4e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-B/16", "ViT-B/32"), "ImageNet-21k", (90,), 1e-3, "linear", 0.03, 0.1),
    Pretraining(("ViT-L/16", "ViT-L/32"), "ImageNet-21k", (30, 90), 1e-3, "linear", 0.03, 0.1),
    Pretraining(
        ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32"),  # "ViT-*" there
        *("ImageNet", (300,), 3e-3, "cosine", 0.3, 0.1),
    ),
)

TABLE4 = {
    "ImageNet": Finetuning(20_000, (0.003, 0.01, 0.03, 0.06)),
    "CIFAR-10": Finetuning(10_000, (0.001, 0.003, 0.01, 0.03)),
    "CIFAR-100": Finetuning(10_000, (0.001, 0.003, 0.01, 0.03)),
    "Pets": Finetuning(500, (0.001, 0.003, 0.01, 0.03)),
    "Flowers-102": Finetuning(500, (0.001, 0.003, 0.01, 0.03)),
    "VTAB": Finetuning(2500, (0.01,)),
}

MODELS5: tuple[str, ...] = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")
# By what was pre-trained on and what was fine-tuned on, in the order of MODELS5; H/14 was not
# trained on ImageNet alone.
TABLE5: dict[str, dict[str, tuple[float, ...]]] = {
    "ImageNet": {
        "CIFAR-10": (98.13, 97.77, 97.86, 97.94),
        "CIFAR-100": (87.13, 86.31, 86.35, 87.07),
        "ImageNet": (77.91, 73.38, 76.53, 71.16),
        REAL: (83.57, 79.56, 82.19, 77.83),
        "Flowers-102": (89.49, 85.43, 89.66, 86.36),
        "Pets": (93.81, 92.04, 93.64, 91.35),
    },
    "ImageNet-21k": {
        "CIFAR-10": (98.95, 98.79, 99.16, 99.13, 99.27),
        "CIFAR-100": (91.67, 91.97, 93.44, 93.04, 93.82),
        "ImageNet": (83.97, 81.28, 85.15, 80.99, 85.13),
        REAL: (88.35, 86.63, 88.40, 85.65, 88.70),
        "Flowers-102": (99.38, 99.11, 99.61, 99.19, 99.51),
        "Pets": (94.43, 93.02, 94.73, 93.09, 94.82),
    },
    "JFT": {
        "CIFAR-10": (99.00, 98.61, 99.38, 99.19, 99.50),
        "CIFAR-100": (91.87, 90.49, 94.04, 92.52, 94.55),
        "ImageNet": (84.15, 80.73, 87.12, 84.37, 88.04),
        REAL: (88.85, 86.27, 89.99, 88.28, 90.33),
        "Flowers-102": (99.56, 99.27, 99.56, 99.45, 99.68),
        "Pets": (95.80, 93.40, 97.11, 95.83, 97.56),
    },
}

TARGETS = ("ImageNet", REAL, "CIFAR-10", "CIFAR-100", "Pets", "Flowers-102")
TABLE6 = (
    Scaling("ViT-B/32", 7, (80.73, 86.27, 98.61, 90.49, 93.40, 99.27), 55),
    Scaling("ViT-B/16", 7, (84.15, 88.85, 99.00, 91.87, 95.80, 99.56), 224),
    Scaling("ViT-L/32", 7, (84.37, 88.28, 99.19, 92.52, 95.83, 99.45), 196),
    Scaling("ViT-L/16", 7, (86.30, 89.43, 99.38, 93.46, 96.81, 99.66), 783),
    Scaling("ViT-L/16", 14, (87.12, 89.99, 99.38, 94.04, 97.11, 99.56), 1567),
    Scaling("ViT-H/14", 14, (88.08, 90.36, 99.50, 94.71, 97.11, 99.71), 4262),
    Scaling("BiT-R50x1", 7, (77.54, 84.56, 97.67, 86.07, 91.11, 94.26), 50),
    Scaling("BiT-R50x2", 7, (82.12, 87.94, 98.29, 89.20, 93.43, 97.02), 199),
    Scaling("BiT-R101x1", 7, (80.67, 87.07, 98.48, 89.17, 94.08, 95.95), 96),
    Scaling("BiT-R152x1", 7, (81.88, 87.96, 98.82, 90.22, 94.17, 96.94), 141),
    Scaling("BiT-R152x2", 7, (84.97, 89.69, 99.06, 92.05, 95.37, 98.62), 563),
    Scaling("BiT-R152x2", 14, (85.56, 89.89, 99.24, 91.92, 95.75, 98.75), 1126),
    Scaling("BiT-R200x3", 14, (87.22, 90.15, 99.34, 93.53, 96.32, 99.04), 3306),
    Scaling("R50+ViT-B/32", 7, (84.90, 89.15, 99.01, 92.24, 95.75, 99.46), 106),
    Scaling("R50+ViT-B/16", 7, (85.58, 89.65, 99.14, 92.63, 96.65, 99.40), 274),
    Scaling("R50+ViT-L/32", 7, (85.68, 89.04, 99.24, 92.93, 96.97, 99.43), 246),
    Scaling("R50+ViT-L/16", 7, (86.60, 89.72, 99.18, 93.64, 97.03, 99.40), 859),
    Scaling("R50+ViT-L/16", 14, (87.12, 89.76, 99.31, 93.89, 97.36, 99.11), 1668),
)

# ViT-B/16 on JFT, ImageNet 5-shot, by `position` and `position_place`. The paper has relative
# positions in the column of the stem, yet they are inside attention, where ours are too.
TABLE8 = {
    ("none", "stem"): 0.61382,
    ("learned", "stem"): 0.64206,
    ("learned", "every-layer"): 0.63964,
    ("learned", "shared"): 0.64292,
    ("learned-2d", "stem"): 0.64001,
    ("learned-2d", "every-layer"): 0.64046,
    ("learned-2d", "shared"): 0.64022,
    ("relative", "every-layer"): 0.64032,
}


def by_model(table: str) -> dict[str, dict[str, Number]]:
    """Table 2 or 5 the other way round: model with its pre-training, then data set."""
    turned: dict[str, dict[str, Number]] = {}
    if table == "table2":
        for data, row in TABLE2.items():
            for model, number in row.items():
                turned.setdefault(model, {})[data] = number
        return turned
    assert table == "table5", table
    for pretrained, rows in TABLE5.items():
        for data, values in rows.items():
            for model, value in zip(MODELS5, values, strict=False):  # H/14 is missing at places
                turned.setdefault(f"{model} ({pretrained})", {})[data] = Number(value)
    return turned


def full_name(table: str, name: str) -> str:
    """The model of a table that a name means: its own, or without what it was pre-trained on."""
    known = by_model(table)
    if name in known:
        return name
    meant = [full for full in known if full.startswith(f"{name} (")]
    if not meant:
        raise unknown(f"model of {table}", name, known)
    if len(meant) > 1:
        raise ConfigError(
            f"{name} stands in {table} more than once; say which: {', '.join(map(repr, meant))}"
        )
    return meant[0]
