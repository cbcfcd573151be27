"""`vitrail reproduce`: the experiments in the `reproduction/` folder of a checkout."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

import vitrail
from vitrail.cli.options import DataOptions
from vitrail.errors import ConfigError, unknown

BUILTIN = "builtin:sign-digits"
ALL = "all"
NAMES = (  # in the order of the paper
    *("table1", "table2", "figure3", "figure4", "figure5", "table5", "table6", "figure6"),
    *("figure7", "transfer", "selfsupervised", "figure8", "heads", "table8", "figure10"),
    "figure11",
)
PROBED = ("figure3", "figure5", "figure8", "heads", "figure11")
CHECKOUT = Path(vitrail.__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Reproduce(DataOptions):
    """Reproduce an experiment of the paper at laptop scale, or check it at the paper's scale.

    table1, table2, table5, table6: published numbers, compared with computed ones. figure3,
    figure4, figure5, figure8, heads, table8, transfer, selfsupervised: many small training runs, at
    most 15 minutes each. figure6, figure7, figure10, figure11: inspection of such models. all:
    everything in turn. Interrupted experiments resume. Needs a checkout of the repository.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """table1, figure3, heads, ... or all."""
    scale: Literal["laptop", "full"] = "laptop"
    """full: build the paper's own models on the meta device; print their cost and commands."""
    data: tuple[str, ...] = (BUILTIN,)
    """Pre-training dataset, such as a .npz of Fashion-MNIST. With --weights: NAME=DATA, such as
    CIFAR-10=cifar/."""
    target: str = ""
    """Target dataset of figure3, transfer and selfsupervised. Without it, models are pre-trained on
    every other class of the data and transferred to the remaining classes."""
    probe: tuple[str, ...] = ()
    """figure3, figure5, figure8, heads, figure11: compare models by closed-form probes on these
    datasets, such as flowers5_160.tar, in place of the data's own test images."""
    weights: tuple[str, ...] = ()
    """table2, table5: NAME=MODEL, such as ViT-H/14=model.npz, to be evaluated on --data."""
    out: Path = Path("runs/reproduction")
    """Folder of the reports and of their training runs; finished runs are reused."""
    docs: Path | None = None
    """Write the reports as sections of README.md in this folder; other sections are kept."""
    workers: int | None = None
    """Parallel training runs, which share the cores. Default: one per core."""
    json: bool = False
    """Print one JSON object per experiment; progress goes to standard error."""

    def run(self) -> None:
        if self.name not in (*NAMES, ALL):
            raise unknown("experiment", self.name, (*NAMES, ALL))
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: must be 1 or more")
        if self.weights and self.scale == "full":
            raise ConfigError("--weights cannot be combined with --scale full")
        if self.docs is not None and (self.weights or self.scale == "full"):
            raise ConfigError("--docs cannot be combined with --weights or --scale full")
        if self.weights and self.data == (BUILTIN,):
            raise ConfigError("--weights needs --data NAME=DATA, such as CIFAR-10=cifar/")
        if self.weights and self.name not in ("table2", "table5"):
            raise ConfigError(f"--weights works with table2 and table5, not with {self.name}")
        if self.probe and self.name not in PROBED:
            raise ConfigError(f"--probe works with {', '.join(PROBED)}, not with {self.name}")
        if not (CHECKOUT / "reproduction" / "__init__.py").exists():
            raise ConfigError(
                "the experiments are not part of the installed package; run `vitrail reproduce` "
                "from a checkout (pip install -e .), which has them in its reproduction/ folder"
            )
        if str(CHECKOUT) not in sys.path:
            sys.path.append(str(CHECKOUT))
        from reproduction.command import run

        run(self)
