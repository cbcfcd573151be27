"""What travels with the weights beside the architecture.

`model.facts` of a model that was loaded, and what `save` writes into a bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.data.preprocessing import from_dict as preprocessing_from_dict
from vitrail.errors import CheckpointError, DataError
from vitrail.models.build import Model
from vitrail.models.checks import pair

if TYPE_CHECKING:
    from vitrail.data.transforms import ImageInput

# In the provenance of a model whose checkpoint did not state its preprocessing.
PREPROCESSING, ASSUMED = "preprocessing", "assumed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """How pictures are prepared, what the classes are called, and where the weights come from."""

    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()  # in the order of the logits; empty if nobody knows
    provenance: Mapping[str, Any] = field(default_factory=dict)
    multi_label: bool = False  # several classes may apply: a yes or no for each of them

    def names(self, count: int) -> tuple[str, ...]:
        """What so many classes are called; by their numbers, if nobody knows."""
        return self.class_names or tuple(map(str, range(count)))

    def prepare(self, pictures: "ImageInput | Sequence[ImageInput]") -> Tensor:
        """One picture or a list as the model takes them, normalized: (B, C, H, W).

        >>> logits = model(model.facts.prepare("cat.jpg"))

        A picture is a path, the bytes of a file, a Pillow image, or pixels: uint8 (H, W) or
        (H, W, C).
        """
        from vitrail.data.transforms import (
            EvalTransform,
            as_sequence,
            input_name,
            normalize,
            read_image,
        )

        how = self.preprocessing
        channels = len(how.mean)
        transform, found = EvalTransform(preprocessing=how, channels=channels), []
        for number, picture in enumerate(as_sequence(pictures)[0]):
            try:
                found.append(transform(read_image(picture, channels)))
            except DataError as error:
                raise DataError(f"{input_name(picture, number)}: {error}") from None
        batch = torch.stack(found) if found else torch.empty(0, channels, *how.size)
        return normalize(batch, how)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of one class among all (B, K) or, where several may apply, of each by itself."""
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "preprocessing": self.preprocessing.to_dict(),
            "class_names": list(self.class_names),
            "provenance": dict(self.provenance),
            **({"multi_label": True} if self.multi_label else {}),
        }


def from_dict(values: Mapping[str, Any]) -> Facts:
    """What `to_dict` wrote."""
    names = values.get("class_names", [])
    provenance = values.get("provenance", {})
    preprocessing = values.get("preprocessing")
    multi_label = values.get("multi_label", False)
    if (
        not isinstance(names, list)
        or not isinstance(provenance, Mapping)
        or not isinstance(multi_label, bool)
        or not isinstance(preprocessing, Mapping)
    ):
        raise CheckpointError("the settings hold no preprocessing, class_names and provenance")
    return Facts(
        preprocessing=preprocessing_from_dict(preprocessing),
        class_names=tuple(map(str, names)),
        provenance=provenance,
        multi_label=multi_label,
    )


def confirmed(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a model whose preprocessing is no assumption any more."""
    return {key: value for key, value in provenance.items() if key != PREPROCESSING}


def facts_of(model: Model) -> Facts:
    """A model's facts; for one that has none yet, the paper's preprocessing."""
    if isinstance(model.facts, Facts):
        return model.facts
    config = model.config
    return Facts(preprocessing=preset("google", pair(config.image_size), config.channels))
