"""What positions, attention distances and areas say: numbers of arrays, and rules for them.

Shapes: h x w patches, N = h * w, M pairs of them, L layers, H heads, n pictures or components.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vitrail.evaluation.bootstrap import RESAMPLES, resample_weights
from vitrail.evaluation.results import Estimate
from vitrail.inspection.attention import places
from vitrail.models.pos_embed import Grid
from vitrail.reproduction.report import Verdict

SHUFFLES = 199  # so that the smallest chance is 1 in 200
CHANCE = 0.05  # below this, structure is taken to be there
EVERYWHERE = 0.9  # of the distance of a head that looks at all patches alike
LOCAL = 0.5  # of that distance: below it a head looks around itself
DIFFER = 0.1  # of that distance, between heads: where all look far, nothing need be learned
MARGIN = 0.05  # of that distance: less is no difference


# --- Rules ---


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of what the paper says, what was measured for it, and whether that is enough."""

    says: str
    measured: str
    rule: str
    holds: bool


def joint(parts: Sequence[bool]) -> Verdict:
    """A claim holds if all of its parts do, and in part if some do."""
    if all(parts):
        return "holds"
    return "holds in part" if any(parts) else "does not hold"


def by_areas(random: Estimate, center: Estimate) -> Verdict:
    """Of how much better maps are than random ones, and than the center."""
    if random.low > 0:
        return "holds" if center.low > 0 else "holds in part"
    return "does not hold" if random.high < 0 else "cannot be told"


def less_local(vit: float, hybrid: float) -> Verdict:
    """Of how far the nearest head of each looks, as a share of an even head's distance."""
    if abs(hybrid - vit) < MARGIN or min(vit, hybrid) > EVERYWHERE:
        return "cannot be told"
    return "holds" if hybrid > vit else "does not hold"


# --- Positions ---


@dataclass(frozen=True, kw_only=True)
class Structure:
    """How much of the grid is seen in a table of similarities."""

    nearness: float  # Spearman's rank correlation of similarity with nearness, all pairs
    rows: float  # similarity within a row, above that of others as far apart
    columns: float
    chances: dict[str, float]  # of each: how often shuffled patches come to as much

    def parts(self) -> Iterator[Part]:
        """The paper's claims of it (section 4.5)."""
        rule = f"as much in fewer than {CHANCE:.0%} of {SHUFFLES} shuffles"
        yield Part(
            says="patches that are near have similar positions",
            measured=f"rank correlation of similarity with nearness {self.nearness:.2f}",
            rule=rule,
            holds=self.chances["nearness"] < CHANCE,
        )
        for name, value in (("row", self.rows), ("column", self.columns)):
            yield Part(
                says=f"so have patches of the same {name}",
                measured=f"similarity within a {name} {value:+.2f} above others as far apart",
                rule=rule,
                holds=self.chances[f"{name}s"] < CHANCE,
            )


def structure(similarity: np.ndarray) -> Structure:
    """How alike the positions of patches (h, w, h, w) are, against how they lie on the grid.

    Chances are those of a Mantel test: the patches of the table change places at random, and the
    same is measured again.
    """
    high, wide = similarity.shape[:2]
    count = high * wide
    table = similarity.reshape(count, count).astype(np.float64)  # (N, N)
    one, other = np.triu_indices(count, 1)  # (M,) each
    down, across = one // wide - other // wide, one % wide - other % wide
    apart, aside = np.hypot(down, across), (down != 0) & (across != 0)
    near = ranks(-apart)
    rng = np.random.default_rng(0)
    found = []
    for shuffle in range(1 + SHUFFLES):
        order = rng.permutation(count) if shuffle else np.arange(count)
        pairs = table[order[one], order[other]]  # (M,)
        found.append(
            (
                correlation(ranks(pairs), near),
                beyond_distance(pairs, apart, down == 0, aside),
                beyond_distance(pairs, apart, across == 0, aside),
            )
        )
    values = dict(zip(("nearness", "rows", "columns"), found[0], strict=True))
    as_much = (np.array(found) >= found[0]).mean(axis=0)  # itself among them
    return Structure(**values, chances=dict(zip(values, as_much.tolist(), strict=True)))


def beyond_distance(
    pairs: np.ndarray, apart: np.ndarray, some: np.ndarray, aside: np.ndarray
) -> float:
    """How much more alike some pairs (M,) are than those aside of any line, at equal distance.

    Hardly any two kinds of pairs are exactly as far apart, so the means of those aside by distance
    are joined by straight lines. Pairs that are nearer than all those, or farther, have nothing to
    be held against and are left out; 0 if none are left.
    """
    distances, group = np.unique(apart[aside], return_inverse=True)
    if not len(distances):
        return 0.0
    means = np.bincount(group, pairs[aside]) / np.bincount(group)
    held = some & (apart >= distances[0]) & (apart <= distances[-1])
    if not held.any():
        return 0.0
    return float((pairs[held] - np.interp(apart[held], distances, means)).mean())


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation of two tables (h, w, h, w) of one grid, over pairs of patches."""
    count = one.shape[0] * one.shape[1]
    pairs = np.triu_indices(count, 1)
    first, second = (ranks(table.reshape(count, count)[pairs]) for table in (one, other))
    return correlation(first, second)


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in order; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[group]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one - one.mean(), other - other.mean()
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / size if size > 0 else 0.0


# --- Attention distance ---


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far heads look."""

    pixels: np.ndarray  # (L, H)
    even: float  # of a head that looks at all patches alike

    @property
    def shares(self) -> np.ndarray:
        return self.pixels / self.even

    @property
    def lower(self) -> np.ndarray:
        """The lower half of the layers, as shares of the even distance."""
        return self.shares[: math.ceil(len(self.pixels) / 2)]

    @property
    def shortest(self) -> float:
        """Of the heads in the lower half: how local attention is there."""
        return float(self.lower.min())

    @property
    def growth(self) -> float:
        """How much farther the upper half of the layers looks than the lower."""
        upper = self.shares[len(self.lower) :]
        return float(upper.mean() - self.lower.mean()) if len(upper) else 0.0

    def parts(self, before: "Reach") -> Iterator[Part]:
        """The paper's three claims of it (section 4.5), and what was so before training."""
        first = self.shares[0]
        yield Part(
            says="some heads attend to most of the image already in the lowest layers",
            measured=f"heads of layer 0 look {span(first)} as far as an even one, "
            f"{span(before.shares[0])} before training",
            rule=f"one {EVERYWHERE:.0%} or more, where heads differ by {100 * DIFFER:.0f} points",
            holds=bool(first.max() >= EVERYWHERE and np.ptp(first) >= DIFFER),
        )
        yield Part(
            says="others look at what is near in the low layers",
            measured=f"the nearest head of the lower half looks {self.shortest:.0%} as far, "
            f"{before.shortest:.0%} before training",
            rule=f"{LOCAL:.0%} or less",
            holds=self.shortest <= LOCAL,
        )
        yield Part(
            says="attention distance grows with depth",
            measured=f"the upper half looks {100 * self.growth:+.0f} points farther than the "
            f"lower, {100 * before.growth:+.0f} before training",
            rule=f"{100 * MARGIN:+.0f} points or more",
            holds=self.growth >= MARGIN,
        )


def span(shares: np.ndarray) -> str:
    return f"{shares.min():.0%} to {shares.max():.0%}"


def even_distance(grid: Grid, patch: tuple[int, int]) -> float:
    """The attention distance in pixels of a head that looks at all patches alike."""
    where = places(grid, patch, 0)  # (N, 2)
    return float(torch.cdist(where, where).mean())


# --- Filters and areas ---


def components_for(explained: np.ndarray, share: float) -> int:
    """How many components, largest first, hold a share of the variance; their shares are (n,)."""
    return int(np.searchsorted(np.cumsum(explained), share - 1e-12)) + 1


def mean_of(values: np.ndarray) -> Estimate:
    """The mean over pictures (n,), and the middle 95 % of those of resampled pictures."""
    weights = np.concatenate(list(resample_weights(len(values), RESAMPLES)))  # (resamples, n)
    low, high = np.quantile(weights @ values / len(values), [0.025, 0.975]).tolist()
    return Estimate(float(values.mean()), low, high)
