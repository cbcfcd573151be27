"""Looking at a picture more than once: mirrored, and in parts. Probabilities are averaged.

Shapes: B pictures, K classes, h x w pixels of a view.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.evaluation.outcome import Loss


@dataclass(frozen=True, kw_only=True)
class Views:
    """What is looked at of each picture."""

    flip: bool = False  # its mirror image too
    crops: int = 1  # 5: its corners and its middle

    def __post_init__(self) -> None:
        if self.crops not in (1, 5):
            raise ConfigError(f"crops={self.crops} cannot be cut; 1 or 5 can")

    def enlarged(self, preprocessing: Preprocessing) -> Preprocessing:
        """What must be prepared so that the crops can be cut out of it."""
        if self.crops == 1:
            return preprocessing
        larger = preprocessing.resize_to
        if larger in (None, preprocessing.size):  # nothing is cut off: all crops would be the same
            high, wide = preprocessing.size
            larger = (high * 8 // 7, wide * 8 // 7)
        return replace(preprocessing, size=larger, resize_to=larger)

    def of(self, images: Tensor, size: tuple[int, int]) -> Iterator[Tensor]:
        """The views of pictures (B, C, H, W), each (B, C, h, w)."""
        (high, wide), (down, across) = images.shape[-2:], size
        below, right = high - down, wide - across
        corners = [(0, 0), (0, right), (below, 0), (below, right), (below // 2, right // 2)]
        for top, left in corners if self.crops == 5 else [(0, 0)]:
            view = images[..., top : top + down, left : left + across]
            yield view
            if self.flip:
                yield view.flip(-1)


def through(
    predict: Callable[[Tensor], Tensor], views: Views, size: tuple[int, int], loss: Loss
) -> Callable[[Tensor], Tensor]:
    """Like `predict`, by the mean probability over the views; as logits again, on the CPU."""
    if views == Views():
        return predict

    def together(images: Tensor) -> Tensor:
        logits = torch.stack([predict(view) for view in views.of(images, size)])  # (V, B, K)
        exact = logits.cpu().double()  # not all devices have float64
        if loss == "softmax":
            return exact.log_softmax(-1).logsumexp(0).float()
        return exact.sigmoid().mean(0).logit(eps=1e-12).float()

    return together
