"""Position embeddings: those of appendix D.4, big_vision's sin-cos, and DINOv3's rotary ones.

Each kind is a module in `POS_EMBEDS` that adds its embedding to tokens; `embedding(grid)` returns
it for a grid of any size, as (T, D): one row for each class or distillation token and each patch in
raster order. Two kinds act inside attention: relative returns `RelativeKeys`, rotary a `Rotation`.
`resized_parameters(grid)` returns the parameters of a model made for another grid. `vit.py` and
`encoder.py` decide where embeddings are added (stem, every layer, shared).

Shapes: h x w patches, T = class tokens + h * w, D width, K channels per head, R relative keys.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from vitrail.models.config import PositionKind, ResizeMethod, VitConfig

Grid = tuple[int, int]  # rows and columns of patches
TEMPERATURE = 10_000.0  # ratio of the longest to the shortest wavelength of the sin-cos embedding
RELATIVE_PREFIX_ROWS = 3  # prefix to patch, patch to prefix, prefix to prefix

# google is scipy.ndimage.zoom(order=1). The next three are what each library does when a loaded
# model is used at another image size; bilinear is timm's loader of Google files, flexivit is
# big_vision's FlexiViT.
RESIZE_METHODS: dict[ResizeMethod, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
    "transformers": {"mode": "bicubic", "align_corners": False},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "bilinear": {"mode": "bilinear", "align_corners": False},
    "flexivit": {"mode": "bilinear", "align_corners": False, "antialias": True},
}


def fixed_table(tokens: Tensor, compute: Callable[..., Tensor], *args: Hashable) -> Tensor:
    """Return `compute(*args)` with the dtype and device of `tokens`, from a cache where possible.

    The cache is bypassed during tracing, in function transforms and for fake tensors.
    """
    if is_transformed() or type(tokens) is not Tensor:
        return compute(*args).to(tokens)
    return cached_table(compute, args, tokens.dtype, tokens.device)


@lru_cache(maxsize=16)
def cached_table(
    compute: Callable[..., Tensor], args: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False):  # the table must be usable in any mode
        return compute(*args).to(device, dtype)


def is_tracing() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace is recording operations."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether operations are traced, or transformed by torch.func or forward-mode autograd."""
    return (
        is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


class PosEmbed(nn.Module):
    """Base class of absolute position embeddings."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens + self.embedding(grid)

    def embedding(self, grid: Grid) -> Tensor:
        raise NotImplementedError

    def resized_parameters(self, grid: Grid) -> dict[str, Tensor]:
        return {}


class NoPosEmbed(PosEmbed):
    """No position information: the lower bound of the ablation."""

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens


class LearnedPosEmbed(PosEmbed):
    """One learned vector per token in raster order: the paper's default ("1-D")."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__(config)
        self.grid = config.grid
        self.prefix = config.num_class_tokens
        self.method: ResizeMethod = config.numerics.position_resize
        self.table = nn.Parameter(
            torch.empty(self.prefix + self.grid[0] * self.grid[1], config.width)
        )

    def embedding(self, grid: Grid) -> Tensor:
        return self.resized_parameters(grid)["table"]

    def resized_parameters(self, grid: Grid) -> dict[str, Tensor]:
        """Interpolate the rows of the patches; those of class tokens do not change."""
        if grid == self.grid:
            return {"table": self.table}
        patches = self.table[self.prefix :].unflatten(0, self.grid)  # (h, w, D)
        patches = resize_grid(patches, grid, self.method).flatten(0, 1)  # (h' * w', D)
        return {"table": torch.cat([self.table[: self.prefix], patches])}  # (T', D)


class Learned2dPosEmbed(PosEmbed):
    """Concatenated embeddings of the column and the row, each of half the width ("2-D")."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__(config)
        self.grid = config.grid
        self.method: ResizeMethod = config.numerics.position_resize
        half = config.width // 2
        self.columns = nn.Parameter(torch.empty(self.grid[1], half))  # X in appendix D.4
        self.rows = nn.Parameter(torch.empty(self.grid[0], half))  # Y
        self.prefix = nn.Parameter(torch.empty(config.num_class_tokens, config.width))

    def embedding(self, grid: Grid) -> Tensor:
        parameters = self.resized_parameters(grid)
        columns = parameters["columns"].expand(*grid, -1)
        rows = parameters["rows"][:, None].expand(*grid, -1)
        patches = torch.cat([columns, rows], dim=-1).flatten(0, 1)  # (h * w, D)
        return torch.cat([self.prefix, patches])  # (T, D)

    def resized_parameters(self, grid: Grid) -> dict[str, Tensor]:
        columns, rows = self.columns, self.rows
        if grid != self.grid:
            columns = resize_line(columns, grid[1], self.method)
            rows = resize_line(rows, grid[0], self.method)
        return {"columns": columns, "rows": rows, "prefix": self.prefix}


class SinCos2dPosEmbed(PosEmbed):
    """Fixed sines and cosines of the column, then of the row (big_vision's sincos2d).

    Frequencies run from 1 to 1 / TEMPERATURE inclusive: the exponent is divided by D / 4 - 1, not
    by D / 4 as in other implementations. Class and distillation token get zeros.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__(config)
        self.prefix = config.num_class_tokens
        self.width = config.width

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens + fixed_table(tokens, sincos_2d, grid, self.width, self.prefix)

    def embedding(self, grid: Grid) -> Tensor:
        return sincos_2d(grid, self.width, self.prefix)  # (T, D)


def sincos_2d(grid: Grid, channels: int, prefix: int = 0) -> Tensor:
    """Sines and cosines of the column, then of the row, after `prefix` rows of zeros: (T, D), D a
    multiple of four."""
    height, width = grid
    quarter = channels // 4
    exponents = torch.arange(quarter, dtype=torch.float64) / max(1, quarter - 1)
    frequencies = TEMPERATURE**-exponents  # (D / 4,)
    columns = torch.arange(width, dtype=torch.float64)[:, None] * frequencies  # (w, D / 4)
    rows = torch.arange(height, dtype=torch.float64)[:, None] * frequencies  # (h, D / 4)
    columns = torch.cat([columns.sin(), columns.cos()], dim=1).expand(height, width, -1)
    rows = torch.cat([rows.sin(), rows.cos()], dim=1)[:, None].expand(height, width, -1)
    patches = torch.cat([columns, rows], dim=-1).flatten(0, 1)  # (h * w, D)
    return torch.cat([patches.new_zeros(prefix, channels), patches])


class RelativeKeys(NamedTuple):
    """Relative position embedding as used by attention."""

    keys: Tensor  # (R, K), one per offset
    offsets: Tensor  # (N, N), the index of the key for each query and key token


class RelativePosEmbed(nn.Module):
    """A learned key for each raster offset between query and key, shared by the heads.

    Appendix D.4 does not define offsets to the class token: pairs with a prefix token use three
    additional rows, after the 2 h w - 1 offsets. For another grid the rows are interpolated.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.patches = config.grid[0] * config.grid[1]
        self.prefix = config.num_prefix
        self.method: ResizeMethod = config.numerics.position_resize
        rows = 2 * self.patches - 1 + RELATIVE_PREFIX_ROWS * (self.prefix > 0)
        self.table = nn.Parameter(torch.empty(rows, config.head_width))

    def embedding(self, grid: Grid) -> RelativeKeys:
        patches = grid[0] * grid[1]
        index = torch.arange(-self.prefix, patches, device=self.table.device)
        offsets = index[:, None] - index + patches - 1  # (h w, h w), from 0 to 2 h w - 2
        if self.prefix:  # the tokens with a negative index
            first = 2 * patches - 1
            from_prefix = torch.where(index < 0, first + 2, first)  # (N,)
            to_prefix = torch.where(index < 0, first + 1, offsets)  # (N, N)
            offsets = torch.where(index[:, None] < 0, from_prefix, to_prefix)
        return RelativeKeys(self.resized_parameters(grid)["table"], offsets)

    def resized_parameters(self, grid: Grid) -> dict[str, Tensor]:
        """Interpolate the rows of the offsets; those of prefix tokens do not change."""
        patches = grid[0] * grid[1]
        if patches == self.patches:
            return {"table": self.table}
        offsets, prefix = self.table.tensor_split([2 * self.patches - 1])
        offsets = resize_line(offsets, 2 * patches - 1, self.method)
        return {"table": torch.cat([offsets, prefix])}


class Rotation(NamedTuple):
    """Rotary position embedding as used by attention."""

    cos: Tensor  # (h * w, K / 2)
    sin: Tensor  # (h * w, K / 2)
    prefix: int  # tokens before the patches, which are not rotated

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys (B, H, N, K) of the patches.

        Channel c of the first half forms a pair with channel c of the second half.
        """
        x, y = heads[:, :, self.prefix :].chunk(2, dim=-1)
        turned = [x * self.cos - y * self.sin, y * self.cos + x * self.sin]
        turned = torch.cat(turned, dim=-1).to(heads.dtype)
        return torch.cat([heads[:, :, : self.prefix], turned], dim=2)


class RotaryPosEmbed(nn.Module):
    """2-D rotary positions of DINOv3 (Siméoni et al. 2025, arXiv:2508.10104), without parameters.

    The centers of the patches have coordinates from -1 to 1 on each axis, whatever the grid. Half
    of a head's K / 2 pairs of channels rotate by 2 pi y / period and the others by 2 pi x / period,
    with periods theta^(4 i / K), i from 0 to K / 4 - 1.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.head_width, self.theta = config.head_width, config.rope_theta
        self.prefix = config.num_prefix

    def rotation(self, grid: Grid, tokens: Tensor) -> Rotation:
        """Return the rotation for a grid, with the dtype and device of `tokens`."""
        table = fixed_table(tokens, rotary_2d, grid, self.head_width, self.theta)
        cos, sin = table.chunk(2, dim=1)
        return Rotation(cos, sin, self.prefix)

    def embedding(self, grid: Grid) -> Tensor:
        return rotary_2d(grid, self.head_width, self.theta)

    def resized_parameters(self, grid: Grid) -> dict[str, Tensor]:
        return {}


def rotary_2d(grid: Grid, channels: int, theta: float) -> Tensor:
    """Cosines, then sines, of the angles: (h * w, K)."""
    exponents = torch.arange(0, channels, 4, dtype=torch.float64) / channels
    frequencies = 2 * torch.pi * theta**-exponents  # (K / 4,)
    rows, columns = (
        ((2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1)[:, None] * frequencies
        for n in grid
    )  # (h, K / 4), (w, K / 4)
    rows = rows[:, None].expand(*grid, -1)
    angles = torch.cat([rows, columns.expand(*grid, -1)], dim=-1).flatten(0, 1)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


POS_EMBEDS: dict[PositionKind, type[nn.Module]] = {
    "none": NoPosEmbed,
    "learned": LearnedPosEmbed,
    "learned-2d": Learned2dPosEmbed,
    "relative": RelativePosEmbed,
    "sincos-2d": SinCos2dPosEmbed,
    "rotary": RotaryPosEmbed,
}


def resize_grid(table: Tensor, grid: Grid, method: ResizeMethod = "google") -> Tensor:
    """Interpolate a table of vectors (h, w, D) to another grid (h', w'), in at least float32.

    A resize along one axis is a matrix, so a resize of a grid is two matrix products, whatever the
    method: differentiable and exportable.
    """
    exact = table.to(torch.promote_types(table.dtype, torch.float32))
    rows = resize_line(exact.flatten(1), grid[0], method).unflatten(1, table.shape[1:])
    return resize_line(rows, grid[1], method).to(table.dtype)  # (h', w, D) → (h', w', D)


def resize_line(table: Tensor, length: int, method: ResizeMethod = "google") -> Tensor:
    """Interpolate rows of vectors (…, n, D) to another length (…, n', D), in at least float32."""
    device = "cpu" if table.is_meta else table.device.type  # there is no autocast on meta
    with torch.autocast(device, enabled=False):
        exact = table.to(torch.promote_types(table.dtype, torch.float32))
        matrix = interpolation_matrix(table.shape[-2], length, method, like=exact)  # (n', n)
        return (matrix @ exact).to(table.dtype)


def interpolation_matrix(old: int, new: int, method: ResizeMethod, *, like: Tensor) -> Tensor:
    """The (new, old) matrix of a resize along one axis, with the dtype and device of `like`.

    Obtained by resizing the identity matrix with F.interpolate, so that it agrees with torch's
    kernels bit for bit. (Resizing single columns would not: torch's antialiasing kernel is wrong
    for images that are one pixel wide.)
    """
    identity = torch.eye(old, dtype=like.dtype, device=like.device)
    return F.interpolate(identity[None, None], (new, old), **RESIZE_METHODS[method])[0, 0]
