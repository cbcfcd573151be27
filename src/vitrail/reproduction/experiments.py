"""What an experiment is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.report import Picture, Report, Table, Verdict
from vitrail.reproduction.workshop import Key

__all__ = ["Experiment", "Key", "Sets"]


@dataclass(frozen=True)
class Sets:
    """Data references: what is pre-trained on, and what that is carried over to.

    Without a target, models that are carried over learn every other class of the one set, and
    then the other half of its classes.
    """

    pretrain: str
    target: str = ""

    @property
    def pretrain_name(self) -> str:
        return short_name(self.pretrain)

    @property
    def source_name(self) -> str:
        """What models that are carried over come from."""
        return self.pretrain_name if self.target else f"every other class of {self.pretrain_name}"

    @property
    def target_name(self) -> str:
        return short_name(self.target) if self.target else "the other classes"


def short_name(data: str) -> str:
    """`fashion_mnist` for ../data/fashion_mnist.npz, `sign-digits` for builtin:sign-digits."""
    return Path(data.rpartition(":")[2]).stem or data


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper."""

    name: str
    title: str
    claim: str  # what the paper says; its numbers are marked as published
    cells: Callable[[Sets], dict[Key, Cell]]  # runs of a laptop's size; {} where nothing learns
    report: Callable[[Mapping[Key, Result], Sets], Report]

    def reported(
        self,
        *,
        did: str,
        found: str,
        verdict: Verdict,
        tables: Sequence[Table] = (),
        pictures: Sequence[Picture] = (),
        data: Mapping[str, Any] | None = None,
    ) -> Report:
        """What it says in the end, under its own name."""
        return Report(
            name=self.name,
            title=self.title,
            claim=self.claim,
            did=did,
            found=found,
            verdict=verdict,
            tables=tables,
            pictures=pictures,
            data=data or {},
        )
