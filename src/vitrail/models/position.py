"""Where a patch is: every position embedding of appendix D.4, and the fixed sines of big_vision.

Each kind is a module in `POSITIONS`. Calling it with tokens and their grid places the tokens;
`at(grid)` gives the vectors themselves, for a grid of any size: (T, D), one row for each class or
distillation token and each patch in raster order. The relative kind adds nothing to tokens: its
`at` gives one key (K) for each offset, and which offset each pair of tokens has. *Where* positions
come in (stem, every layer, shared) is for `vit.py` and `encoder.py` to know. `tables_at(grid)`
gives the parameters that a model made for another grid would start with.

Shapes: h x w patches, P placed tokens before them, T = P + h * w, D width, K channels per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.models.config import PositionKind, ResizeMethod, VitConfig
from vitrail.models.grids import resize_grid, resize_line
from vitrail.models.kept import Kept

Grid = tuple[int, int]
Tables = dict[str, Tensor]
TEMPERATURE = 10_000.0  # of the sines: the longest wave is this times the shortest
RELATIVE_PREFIX_ROWS = 3  # prefix to patch, patch to prefix, prefix to prefix


class NoPosition(nn.Module):
    """A bag of patches: the ablation's lower bound."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens

    def tables_at(self, grid: Grid) -> Tables:
        return {}


class LearnedPosition(nn.Module):
    """One free vector per token, along the raster order: the paper's default ("1-D")."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.prefix = config.placed_prefix
        self.method: ResizeMethod = config.numerics.position_resize
        self.table = nn.Parameter(
            torch.empty(self.prefix + self.grid[0] * self.grid[1], config.width)
        )
        self.kept = Kept()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens + self.at(grid)

    def at(self, grid: Grid) -> Tensor:
        if grid == self.grid:
            return self.table
        return self.kept.get(self.table, grid, lambda: self.tables_at(grid)["table"])

    def tables_at(self, grid: Grid) -> Tables:
        """The table on another grid; rows of class and distillation token stay as they are."""
        patches = self.table[self.prefix :].unflatten(0, self.grid)  # (h, w, D)
        patches = resize_grid(patches, grid, self.method).flatten(0, 1)  # (h' * w', D)
        return {"table": torch.cat([self.table[: self.prefix], patches])}  # (T', D)


class Learned2dPosition(nn.Module):
    """A vector of half the width for each column and one for each row, side by side ("2-D")."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.method: ResizeMethod = config.numerics.position_resize
        half = config.width // 2
        self.columns = nn.Parameter(torch.empty(self.grid[1], half))  # X in appendix D.4
        self.rows = nn.Parameter(torch.empty(self.grid[0], half))  # Y
        self.prefix = nn.Parameter(torch.empty(config.placed_prefix, config.width))
        self.kept_columns, self.kept_rows = Kept(), Kept()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens + self.at(grid)

    def at(self, grid: Grid) -> Tensor:
        tables = self.tables_at(grid)
        columns = tables["columns"].expand(*grid, -1)
        rows = tables["rows"][:, None].expand(*grid, -1)
        patches = torch.cat([columns, rows], dim=-1).flatten(0, 1)  # (h * w, D)
        return torch.cat([self.prefix, patches])  # (T, D)

    def tables_at(self, grid: Grid) -> Tables:
        columns, rows = self.columns, self.rows
        if grid != self.grid:
            columns = self.kept_columns.get(
                columns, grid, lambda: resize_line(self.columns, grid[1], self.method)
            )
            rows = self.kept_rows.get(
                rows, grid, lambda: resize_line(self.rows, grid[0], self.method)
            )
        return {"columns": columns, "rows": rows, "prefix": self.prefix}


class Sincos2dPosition(nn.Module):
    """Fixed sines and cosines of the column, then of the row (big_vision's sincos2d).

    Frequencies run from 1 to 1 / TEMPERATURE, both ends included: the exponent divides by
    D / 4 - 1 and not, as in other codes, by D / 4. Class and distillation token get nothing.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.prefix = config.placed_prefix
        self.width = config.width
        self.kept = Kept()

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        key = (grid, tokens.dtype, tokens.device)
        return tokens + self.kept.get(None, key, lambda: self.at(grid).to(tokens))

    def at(self, grid: Grid) -> Tensor:
        patches = sines(grid, self.width)
        return torch.cat([patches.new_zeros(self.prefix, self.width), patches])  # (T, D)

    def tables_at(self, grid: Grid) -> Tables:
        return {}


def sines(grid: Grid, channels: int) -> Tensor:
    """Sines and cosines of the column, then of the row: (h * w, D), D a multiple of four."""
    height, width = grid
    quarter = channels // 4
    exponents = torch.arange(quarter, dtype=torch.float64) / max(1, quarter - 1)
    waves = TEMPERATURE**-exponents  # (D / 4,)
    columns = torch.arange(width, dtype=torch.float64)[:, None] * waves  # (w, D / 4)
    rows = torch.arange(height, dtype=torch.float64)[:, None] * waves  # (h, D / 4)
    across = torch.cat([columns.sin(), columns.cos()], dim=1).expand(height, width, -1)
    down = torch.cat([rows.sin(), rows.cos()], dim=1)[:, None].expand(height, width, -1)
    return torch.cat([across, down], dim=-1).flatten(0, 1)


class Relative(NamedTuple):
    """What attention needs of relative positions."""

    keys: Tensor  # (R, K), one for each offset
    offsets: Tensor  # (T, T), which of them belongs to each query and key


class RelativePosition(nn.Module):
    """A learned key for every raster offset between query and key, shared by the heads.

    Appendix D.4 leaves open what the class token does: here pairs with a prefix token have three
    rows of their own, after the 2 N - 1 offsets. Another grid stretches the line of offsets.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.patches = config.grid[0] * config.grid[1]
        self.prefix = config.num_prefix
        self.method: ResizeMethod = config.numerics.position_resize
        rows = 2 * self.patches - 1 + RELATIVE_PREFIX_ROWS * (self.prefix > 0)
        self.table = nn.Parameter(torch.empty(rows, config.head_width))
        self.kept = Kept()

    def at(self, grid: Grid) -> Relative:
        patches = grid[0] * grid[1]
        place = torch.arange(patches, device=self.table.device)
        offsets = place[:, None] - place + patches - 1  # (N, N), from 0 to 2 N - 2
        if self.prefix:
            first = 2 * patches - 1
            offsets = nn.functional.pad(offsets, (self.prefix, 0, self.prefix, 0), value=first + 2)
            offsets[: self.prefix, self.prefix :] = first
            offsets[self.prefix :, : self.prefix] = first + 1
        return Relative(self.tables_at(grid)["table"], offsets)

    def tables_at(self, grid: Grid) -> Tables:
        """The table for another number of patches; rows of prefix tokens stay as they are."""
        if grid[0] * grid[1] == self.patches:
            return {"table": self.table}
        return {"table": self.kept.get(self.table, grid, lambda: self.stretched(grid))}

    def stretched(self, grid: Grid) -> Tensor:
        offsets, prefix = self.table.tensor_split([2 * self.patches - 1])
        return torch.cat([resize_line(offsets, 2 * grid[0] * grid[1] - 1, self.method), prefix])


POSITIONS: dict[PositionKind, type[nn.Module]] = {
    "none": NoPosition,
    "learned": LearnedPosition,
    "learned-2d": Learned2dPosition,
    "relative": RelativePosition,
    "sincos-2d": Sincos2dPosition,
}
