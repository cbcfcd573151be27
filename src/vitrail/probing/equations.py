"""The equations behind the closed-form probe: set up from rows or from sums, solved for any l2.

X is the whitened features (minus their mean, divided by their standard deviation + 1e-5) with a
constant 100 appended, Y is +1 at a row's label and -1 elsewhere, and the (D + 1, C) weights W are
those with the least |XW - Y|^2 + l2 |W|^2.

Whitened features sum to zero, so the constant is at right angles to all of them: its weight has a
formula of its own, and what is left to solve is D x D or, with fewer rows than features, n x n.

Shapes: n rows, D features, C classes, L values of l2, r = min(n, D).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.probing.rows import Rows, chunks, whole

BIAS = 100.0  # the constant feature; large, so that its weight is small and hardly penalized
EPSILON = 1e-5  # added to each standard deviation
BLOCK = 192  # columns of the Gram matrix at a time; only its upper blocks are computed


@dataclass(frozen=True, eq=False)
class System:
    """Equations (matrix + l2) V = right. V are the weights or, with few rows, X'V are."""

    counts: Tensor  # (C,) rows of each class
    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    matrix: Tensor  # X'X (D, D) or XX' (n, n)
    right: Tensor  # X'Y (D, C) or Y (n, C)
    x: Tensor | None = None  # (n, D) whitened, if XX' is the matrix

    @property
    def constant(self) -> float:
        """The squared length of the constant feature."""
        return BIAS**2 * float(self.counts.sum())

    def solve(self, l2: float) -> Tensor:
        """The weights for one l2. (D + 1, C)"""
        shifted = self.matrix.clone()
        shifted.diagonal().add_(l2)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if failed:  # l2 is lost in the rounding of large eigenvalues
            return decompose(self).solve(l2)
        return self.weights(torch.cholesky_solve(self.right, factor), l2)

    def weights(self, solution: Tensor, l2: float) -> Tensor:
        """The weights that a V stands for, the constant's in the last row. (D + 1, C)"""
        weights = solution if self.x is None else self.x.T @ solution  # (D, C)
        bias = BIAS * (2 * self.counts - self.counts.sum()) / (self.constant + l2)  # (C,)
        return torch.cat([weights, bias[None]])


def set_up(data: Rows) -> System:
    """The smaller of the two systems, which have the same answer."""
    counts = data.counts().double()
    mean = torch.zeros(data.width, dtype=torch.float64)
    for _, part in chunks(data.features):
        mean += part.sum(0)
    mean /= len(data)
    if len(data) <= data.width:
        x = whole(data.features).sub_(mean)
        std = x.square().mean(0).sqrt() + EPSILON
        x.div_(std)
        y = 2 * F.one_hot(data.labels, data.classes).double() - 1
        return System(counts, mean, std, x @ x.T, y, x)
    sums = torch.zeros(data.classes, data.width, dtype=torch.float64)
    gram = torch.zeros(data.width, data.width, dtype=torch.float64)
    for rows, part in chunks(data.features):
        x = part.sub_(mean)
        sums.index_add_(0, data.labels[rows], x)
        for start in range(0, data.width, BLOCK):
            block = slice(start, start + BLOCK)
            gram[block, start:].addmm_(x[:, block].T, x[:, start:])
    return normal_equations(counts, mean, sums, gram.triu() + gram.triu(1).T)


def normal_equations(counts: Tensor, mean: Tensor, sums: Tensor, gram: Tensor) -> System:
    """X'X and X'Y of whitened features from (C, D) and (D, D) sums of centered ones."""
    std = (gram.diagonal() / counts.sum()).clamp_min(0).sqrt() + EPSILON
    right = 2 * sums.T / std[:, None]  # Y is 2 at the label, minus 1; centered features sum to 0
    return System(counts, mean, std, gram / std / std[:, None], right)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A system in the basis in which its matrix is diagonal: any l2 is a division away."""

    system: System
    values: Tensor  # (r,) not negative
    vectors: Tensor  # (r, r), one in each column
    right: Tensor  # (r, C)

    def solve(self, l2: float) -> Tensor:
        """The weights for one l2. (D + 1, C)"""
        return self.system.weights(self.vectors @ (self.right / (self.values + l2)[:, None]), l2)

    def freedom(self, rows: slice, x: Tensor, l2: Tensor) -> Tensor:
        """1 - h: how little each of some rows pulls the fit to itself. (m, L)"""
        shrink = 1 / (self.values[:, None] + l2)  # (r, L)
        if self.system.x is None:
            pull = (x @ self.vectors).square_() @ shrink
        else:
            pull = self.vectors[rows].square() @ (self.values[:, None] * shrink)
        constant = self.system.constant
        pull += BIAS**2 / (constant + l2)
        least = l2 / (self.values.sum() + constant + l2)  # what rounding must not pass
        return (1 - pull).clamp_min(least)


def decompose(system: System) -> Spectrum:
    """One decomposition, for every l2."""
    values, vectors = torch.linalg.eigh(system.matrix)
    return Spectrum(system, values.clamp_min(0), vectors, vectors.T @ system.right)
