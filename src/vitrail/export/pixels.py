"""Preprocessing inside the graph: pixels of any size to normalized images.

`EvalTransform` resizes with torch's kernels for bytes, which ONNX does not have. Here a resize is a
product with a matrix that is computed from the sizes: the same positions, filters and edges, in
float64 except for the scale, which torch rounds to float32. Pixels that the center crop removes are
not computed.

Shapes: B images, C channels, H x W pixels before, h x w after.
"""

import torch
from torch import Tensor, nn

from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.errors import ConfigError

TAPS = {"nearest": [0.0], "bilinear": [0.0, 1.0], "bicubic": [-1.0, 0.0, 1.0, 2.0]}
SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}  # filters are 0 beyond
BICUBIC = -0.75  # the parameter of torch's bicubic filter
ANTIALIAS_BICUBIC = -0.5  # with antialiasing, as in Pillow


class Preprocess(nn.Module):
    """Pixels uint8 (B, H, W, C) of any size to normalized images (B, C, h, w)."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.config = preprocessing
        self.filter: Interpolation = preprocessing.interpolation
        if self.filter == "lanczos" and not preprocessing.antialias:
            raise ConfigError("lanczos without antialiasing does not exist; use bicubic")
        self.antialias = preprocessing.antialias and self.filter in SUPPORT  # torch: no others

    def forward(self, pixels: Tensor) -> Tensor:
        config = self.config
        images = pixels.permute(0, 3, 1, 2).float()  # (B, C, H, W)
        height, width = images.shape[2:]
        rows, columns = self.resized_size(height, width)
        images = images @ self.crop_matrix(width, columns, config.size[1]).mT  # (B, C, H, w)
        if self.antialias:  # torch's kernel for bytes rounds after each axis
            images = (images + 0.5).floor().clamp(0, 255)
        images = self.crop_matrix(height, rows, config.size[0]) @ images  # (B, C, h, w)
        images = ((images + 0.5).floor() if self.antialias else images.round()).clamp(0, 255)
        mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
        return images * (1 / (255 * std)) - mean / std

    def resized_size(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Rows and columns after the resize, before the center crop."""
        target = self.config.resize_to or self.config.size
        if self.config.resize == "direct":
            return float64(target[0]), float64(target[1])
        short = min(target)
        rows, columns = height * short // width, width * short // height
        return float64(rows).clamp(min=short), float64(columns).clamp(min=short)

    def crop_matrix(self, old: int, new: Tensor, size: int) -> Tensor:
        """The matrix (size, old) of a resize from `old` to `new` and a center crop to `size`.

        If `new` is smaller than `size`, rows of zeros pad both sides with black.
        """
        half = (new - size) / 2
        start = torch.where(half < 0, half.ceil(), half.round())
        positions = torch.arange(size, dtype=torch.float64) + start  # (size,)
        matrix = resize_matrix(old, new, positions, self.filter, antialias=self.antialias)
        inside = (positions >= 0) & (positions < new)
        return torch.where(inside[:, None], matrix, 0.0)


def resize_matrix(
    old: int, new: Tensor, positions: Tensor, filter: Interpolation, *, antialias: bool
) -> Tensor:
    """Rows of the float32 matrix (new, old) of a resize along one axis, at `positions` (n,)."""
    columns = torch.arange(old, dtype=torch.float64)  # (old,)
    positions = positions[:, None]  # (n, 1)
    if filter == "area":  # the mean of all pixels that the new one covers, entirely or partly
        start = (positions * old / new).floor()
        end = ((positions + 1) * old / new).ceil()
        return ((columns >= start) & (columns < end)).float() / (end - start).float()
    scale = round_to_float32(float64(old) / new)
    shift = 0.0 if antialias or filter == "nearest" else 0.5
    center = round_to_float32((positions + 0.5) * scale - shift)
    if antialias:  # all pixels under the filter, which grows with the scale
        distance = (columns + 0.5 - center).abs() / scale.clamp(min=1)  # (n, old)
        weights = evaluate_filter(filter, distance, ANTIALIAS_BICUBIC)
        return (weights / weights.sum(dim=1, keepdim=True)).float()
    # A few neighbors of each position; beyond the edge, the pixel at the edge is used.
    center = center[..., None]  # (n, 1, 1)
    neighbors = center.floor() + torch.tensor(TAPS[filter], dtype=torch.float64)  # (n, 1, taps)
    weights = (neighbors.clamp(0, old - 1) == columns[:, None]).double()  # (n, old, taps)
    if filter != "nearest":
        weights = weights * evaluate_filter(filter, (center - neighbors).abs(), BICUBIC)
    return weights.sum(dim=2).float()  # (n, old)


def evaluate_filter(filter: Interpolation, distance: Tensor, a: float) -> Tensor:
    """The filter at a distance >= 0; `a` is the parameter of bicubic filters."""
    d = distance.clamp(max=SUPPORT[filter])
    if filter == "bilinear":
        return 1 - d
    if filter == "lanczos":
        return sinc(d) * sinc(d / 3)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d < 1, near, far)


def sinc(x: Tensor) -> Tensor:
    angle = torch.pi * x
    return torch.where(x == 0, 1.0, angle.sin() / angle)


def round_to_float32(values: Tensor) -> Tensor:
    return values.float().double()


def float64(size: int) -> Tensor:
    return torch.scalar_tensor(size, dtype=torch.float64)
