"""What a model may carry beside its weights, as types alone: `checkpoints/facts.py` has the values.

A model does not use them and does not know where they come from; whoever has a model may.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class FactsLike(Protocol):
    """How pictures are prepared, what the classes are called, where the weights come from."""

    @property
    def preprocessing(self) -> Any: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    @property
    def provenance(self) -> Mapping[str, Any]: ...

    @property
    def multi_label(self) -> bool: ...

    def names(self, count: int) -> tuple[str, ...]:
        """What so many classes are called."""
        ...

    def prepare(self, pictures: Any) -> Tensor:
        """One picture or a list as the model takes them, normalized: (B, C, H, W)."""
        ...

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of each class, of logits (B, K)."""
        ...
