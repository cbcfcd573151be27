"""The numbers of the paper (published.toml): for comparison, never presented as ours."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import ConfigError, unknown

DATA: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
)
JFT_IMAGES: float = DATA["jft_images"]
REAL = "ImageNet ReaL"
TARGETS: list[str] = DATA["table6"]["targets"]


class Accuracy(NamedTuple):
    """In percent; the standard deviation over three fine-tuning runs where it is published."""

    value: float
    deviation: float | None = None

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.value}"
        return f"{self.value:.2f} ± {self.deviation:.2f}"


class Scaling(NamedTuple):
    """A row of table 6: pre-trained on JFT, then fine-tuned."""

    model: str
    epochs: int
    exaflops: float
    accuracies: list[float]  # of TARGETS

    @property
    def family(self) -> str:
        if self.model.startswith("BiT"):
            return "ResNet"
        return "ViT" if self.model.startswith("ViT") else "hybrid"

    @property
    def average(self) -> float:
        """Mean over the five target datasets; ReaL has the images of ImageNet and is left out."""
        five = [x for name, x in zip(TARGETS, self.accuracies, strict=True) if name != REAL]
        return sum(five) / len(five)


# model (pre-training dataset) → target → accuracy
TABLE2: dict[str, dict[str, Accuracy]] = {
    model: {
        target: Accuracy(*row[column])
        for target, row in DATA["table2"]["accuracy"].items()
        if column < len(row)
    }
    for column, model in enumerate(DATA["table2"]["models"])
}
TABLE5: dict[str, dict[str, Accuracy]] = {
    f"{model} ({pretrained})": {
        target: Accuracy(row[column]) for target, row in rows.items() if column < len(row)
    }
    for pretrained, rows in DATA["table5"]["accuracy"].items()
    for column, model in enumerate(DATA["table5"]["models"])
    if all(column < len(row) for row in rows.values())
}
CORE_DAYS = dict(zip(DATA["table2"]["models"], DATA["table2"]["core_days"], strict=True))
TABLE6 = tuple(Scaling(**row) for row in DATA["table6"]["rows"])
TABLE8 = {(row["position"], row["place"]): row["accuracy"] for row in DATA["table8"]["rows"]}
WITH_ACCURACIES = {"table2": TABLE2, "table5": TABLE5}


def full_name(table: str, name: str) -> str:
    """Return the model of a table by its full name or without its pre-training dataset."""
    models = WITH_ACCURACIES[table]
    matches = [full for full in models if full == name or full.startswith(f"{name} (")]
    if not matches:
        raise unknown(f"model of {table}", name, models)
    if len(matches) > 1:
        raise ConfigError(
            f"{name} is ambiguous in {table}; use one of: {', '.join(map(repr, matches))}"
        )
    return matches[0]
