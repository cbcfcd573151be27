"""What looking inside a model finds, as arrays: made by the other files here, drawn by `page`.

Shapes: L layers, H heads, N tokens of which h x w are patches, P x P pixels of a patch, C channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """A part of a picture, in its own pixels."""

    top: float
    left: float
    bottom: float
    right: float


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What the first layer looks for: figure 7, left."""

    components: np.ndarray  # (n, P, P, C) principal components, or kernels where n are few
    explained: np.ndarray  # (n,) share of the variance that each component stands for


@dataclass(frozen=True, kw_only=True)
class PositionTiles:
    """How alike the positions of patches are: figure 7, center, and figure 10."""

    title: str  # "positions", or "positions of layer 3"
    kind: str = "learned"  # as models call it: learned, learned-2d, sincos-2d or relative
    similarity: np.ndarray  # (h, w, h, w): tile (i, j) shows patch (i, j) against all patches


@dataclass(frozen=True, kw_only=True)
class Study:
    """How attention goes over many pictures, by layer and head: figure 7, right, and figure 11."""

    images: int
    patch: tuple[float, float]  # pixels of a patch, down and across
    distance: dict[str, np.ndarray]  # variant → (L, H) mean distance in pixels
    entropy: np.ndarray  # (L, H) mean over queries, as a share of the largest possible: 0 to 1
    redundancy: np.ndarray  # (L, H, H) cosine similarity of the heads' maps, 1 on the diagonal
    norms: np.ndarray  # (L, 5) quantiles 0, 0.25, 0.5, 0.75, 1 of the patch tokens' norms
    prefix_norms: np.ndarray  # (L, prefix) mean norm of class token, registers, …
    outliers: np.ndarray  # (L,) share of the patch tokens whose norm is far above the median


@dataclass(frozen=True, kw_only=True)
class Curves:
    """How the probability of a class moves as pixels are put in, or taken out, best ones first."""

    shares: np.ndarray  # (points,) shares of the pixels, 0 to 1
    insertion: np.ndarray  # (points,) mean probability, beginning with the picture blurred
    deletion: np.ndarray  # (points,) mean probability, beginning with the whole picture
    insertion_area: float  # under the curve: larger is better
    deletion_area: float  # smaller is better


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whether explanations tell the truth: for each method its curves, and how it reacts to a model
    with random weights."""

    curves: dict[str, Curves]  # method → curves; "random" and "center" are there to compare with
    sanity: dict[str, float]  # method → rank correlation of its maps with those of random weights
    images: int


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen of one picture."""

    name: str
    pixels: np.ndarray  # uint8 (height, width, 3): the picture as it is
    box: Box  # the part of it that the model sees
    classes: tuple[tuple[str, float], ...]  # likeliest first: name, probability
    label: str = ""  # the true class, where it is known
    lag: float = 0.0  # how far, in patches, what tokens see lies above and left of their patches
    maps: dict[str, np.ndarray] = field(default_factory=dict)  # "rollout", … → (h, w), 0 to 1
    class_maps: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    # method → class → (h, w), 0 to 1: where it sees that class
    colors: np.ndarray | None = None  # (h, w, 3), 0 to 1: principal components of patch tokens
    attention: np.ndarray | None = None  # uint8 (L, H, T, T), each row's largest is 255
    peaks: np.ndarray | None = None  # float32 (L, H, T): the attention that 255 stands for
    layers: dict[int, np.ndarray] = field(default_factory=dict)  # layer → (H, N, N), if asked for
    grid: tuple[int, int] = (0, 0)  # of the attention's patches, which come last of the T tokens
    neighbors: tuple["Neighbor", ...] = ()


@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """A picture of the data set that is like another."""

    name: str
    label: str
    similarity: float
    pixels: np.ndarray  # uint8 (height, width, 3), small


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """A data set as points, near each other where the model sees them alike."""

    points: np.ndarray  # (n, 2)
    labels: np.ndarray  # (n,)
    classes: tuple[str, ...]
    method: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that was found; what does not apply to a model is None or empty."""

    title: str
    facts: Mapping[str, str]
    multi_label: bool = False  # several classes may apply, and each has a probability of its own
    prefix: tuple[str, ...] = ()  # what the tokens before the patches are called
    filters: Filters | None = None
    positions: tuple[PositionTiles, ...] = ()
    mixing: np.ndarray | None = None  # (n, h, w) token-mixing weights of a Mixer's first layer
    study: Study | None = None
    looks: tuple[Look, ...] = ()
    trust: Trust | None = None
    scatter: Scatter | None = None
    notes: tuple[str, ...] = ()
