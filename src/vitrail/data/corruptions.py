"""The 15 common corruptions of ImageNet-C (Hendrycks & Dietterich 2019, arXiv:1903.12261).

    corrupt(pixels, "fog", severity=3)       uint8 (H, W, 3) → uint8 (H, W, 3)

Pure functions of an image, a severity and a seed, with the published parameters for 224 x 224
pixels. Differences: the texture of frost is generated instead of cut from photographs, glass blur
moves the pixels of all images in the same way, and motion blur is that of the package
imagecorruptions, without ImageMagick. Inside, pixels are floats from 0 to 1, (H, W, 3).
"""

import io
import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vitrail.errors import ConfigError, unknown

SEVERITIES = (1, 2, 3, 4, 5)
PARAMETERS: dict[str, tuple] = {  # one entry for each severity
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (60, 25, 12, 5, 3),
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    ),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": (25, 18, 15, 10, 7),
}
CORRUPTIONS = tuple(PARAMETERS)


def corrupt(pixels: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    """Return the corrupted image; the same for the same seed."""
    if name not in PARAMETERS:
        raise unknown("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise ConfigError(f"severity={severity} must be 1 to 5")
    value = PARAMETERS[name][severity - 1]
    rng = np.random.default_rng([seed, severity, CORRUPTIONS.index(name)])
    x, (height, width) = pixels / 255.0, pixels.shape[:2]
    match name:
        case "gaussian_noise":
            x = x + rng.normal(size=x.shape, scale=value)
        case "shot_noise":
            x = rng.poisson(x * value) / value
        case "impulse_noise":
            flipped, salt = rng.random(x.shape) < value, rng.random(x.shape) < 0.5
            x = np.where(flipped, salt.astype(float), x)
        case "defocus_blur":  # a disk whose edge is smoothed
            radius, sigma = value
            side = np.arange(-max(radius, 8), max(radius, 8) + 1)
            disk = (side[:, None] ** 2 + side**2 <= radius**2).astype(float)
            edge = gaussian(sigma, 1 if radius <= 8 else 2)
            disk = filter2d((disk / disk.sum())[:, :, None], np.outer(edge, edge))
            x = filter2d(x, disk[:, :, 0])
        case "glass_blur":  # blur, exchange each pixel with one nearby, blur
            sigma, reach, rounds = value
            moved = exchanged(height, width, reach, rounds)
            x = gaussian_blur(x, sigma).reshape(-1, 3)[moved].reshape(x.shape)
            x = gaussian_blur(x, sigma)
        case "motion_blur":
            x = blur_along(x, value[0], value[1], rng.uniform(-45, 45))
        case "zoom_blur":  # the mean of the image and enlarged copies
            factors = np.arange(1, *value)
            x = (x + sum(zoomed(x, factor) for factor in factors)) / (len(factors) + 1)
        case "snow":
            mean, scale, zoom, threshold, radius, sigma, mix = value
            flakes = zoomed(rng.normal(mean, scale, (height, width, 1)), zoom)
            flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
            flakes = blur_along(flakes, radius, sigma, rng.uniform(-135, -45))
            gray = x @ np.array([0.299, 0.587, 0.114])
            x = mix * x + (1 - mix) * np.maximum(x, gray[:, :, None] * 1.5 + 0.5)
            x = x + flakes + np.rot90(flakes, 2)
        case "frost":  # a generated texture: bright veins in bluish ice
            ice = [np.abs(2 * plasma(max(height, width), 1.6, rng) - 1) for _ in range(2)]
            veins = (1 - np.minimum(*ice))[:height, :width, None] ** 3
            x = value[0] * x + value[1] * veins * np.array([0.85, 0.93, 1.0])
        case "fog":
            thickness, decay = value
            clouds = plasma(max(height, width), decay, rng)[:height, :width, None]
            x = (x + thickness * clouds) * x.max() / (x.max() + thickness)
        case "brightness":  # of HSV: hue and saturation stay
            level = x.max(axis=2, keepdims=True)
            brighter = np.clip(level + value, 0, 1)
            x = np.where(level > 0, x * brighter / np.where(level > 0, level, 1), brighter)
        case "contrast":
            means = x.mean(axis=(0, 1), keepdims=True)
            x = (x - means) * value + means
        case "elastic_transform":  # a random affine map, then smooth random displacements
            alpha, sigma, reach = value
            center, size = np.array([width, height]) / 2, min(height, width) // 3
            points = center + np.array([[size, size], [size, -size], [-size, -size]])
            targets = points + rng.uniform(-reach, reach, (3, 2))
            corners = np.column_stack([targets, np.ones(3)])
            inverse = np.linalg.solve(corners, points)  # (3, 2): target → source
            grid = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1)
            x = sample(x, np.concatenate([grid, np.ones((height, width, 1))], axis=2) @ inverse)
            moves = rng.uniform(-1, 1, (height, width, 2))
            x = sample(x, grid + alpha * gaussian_blur(moves, sigma, truncate=3))
        case "pixelate":
            image, size = Image.fromarray(pixels), (int(width * value), int(height * value))
            small = image.resize(size, Image.Resampling.BOX)
            return np.asarray(small.resize(image.size, Image.Resampling.NEAREST))
        case "jpeg_compression":
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "JPEG", quality=value)
            return np.asarray(Image.open(stream))
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)


# Parts of the above; images are (H, W, C).


@cache
def exchanged(height: int, width: int, reach: int, rounds: int) -> np.ndarray:
    """Return where each pixel comes from after exchanging neighbors. (H W,)"""
    rng = np.random.default_rng([height, width, reach, rounds])
    places = np.arange(height * width).reshape(height, width).tolist()
    for _ in range(rounds):
        for row in range(height - reach - 1, reach, -1):
            steps = rng.integers(-reach, reach, (width, 2)).tolist()
            for column in range(width - reach - 1, reach, -1):
                down, right = steps[column]
                other = places[row + down]
                here = places[row][column]
                places[row][column], other[column + right] = other[column + right], here
    return np.array(places).ravel()


def gaussian(sigma: float, radius: int) -> np.ndarray:
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return weights / weights.sum()


def gaussian_blur(x: np.ndarray, sigma: float, truncate: float = 4) -> np.ndarray:
    weights = gaussian(sigma, int(truncate * sigma + 0.5))
    for kernel in (weights[:, None], weights[None]):
        x = filter2d(x, kernel, "symmetric")
    return x


def filter2d(x: np.ndarray, kernel: np.ndarray, border: str = "reflect") -> np.ndarray:
    down, across = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = np.pad(x, ((down, down), (across, across), (0, 0)), border)  # type: ignore[arg-type]
    images = torch.from_numpy(padded).float().permute(2, 0, 1)[:, None]
    blurred = F.conv2d(images, torch.from_numpy(kernel).float()[None, None])
    return blurred[:, 0].permute(1, 2, 0).double().numpy()


def blur_along(x: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """Average shifted copies with the weights of half a Gaussian; edges are repeated."""
    width = 2 * radius + 1
    weights = np.exp(-0.5 * (np.arange(width) / sigma) ** 2)
    weights /= weights.sum()
    sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    height, wide = x.shape[:2]
    total = np.zeros_like(x)
    for step, weight in enumerate(weights):
        down, right = (-math.ceil(step * part - 0.5) for part in (sine, cosine))
        if abs(down) >= height or abs(right) >= wide:
            break
        rows = np.clip(np.arange(height) - down, 0, height - 1)
        columns = np.clip(np.arange(wide) - right, 0, wide - 1)
        total += weight * x[rows[:, None], columns]
    return total


def zoomed(x: np.ndarray, factor: float) -> np.ndarray:
    """Enlarge the center to the size of the image, bilinearly."""
    height, width = x.shape[:2]
    high, wide = math.ceil(height / factor), math.ceil(width / factor)
    top, left = (height - high) // 2, (width - wide) // 2
    part = torch.from_numpy(x[top : top + high, left : left + wide].copy()).permute(2, 0, 1)
    size = (round(high * factor), round(wide * factor))
    large = F.interpolate(part[None], size, mode="bilinear", align_corners=True)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return large.permute(1, 2, 0).numpy()[top : top + height, left : left + width]


def sample(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Read an image at (column, row) positions (H, W, 2), bilinearly; borders are reflected."""
    size = np.array([x.shape[1], x.shape[0]])
    grid = torch.from_numpy((2 * places + 1) / size - 1)[None]
    images = torch.from_numpy(np.ascontiguousarray(x)).permute(2, 0, 1)[None]
    read = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return read[0].permute(1, 2, 0).numpy()


def plasma(side: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """Return a plasma fractal by the diamond-square algorithm, at least `side` large, 0 to 1."""
    size = 2 ** math.ceil(math.log2(max(side, 2)))
    grid, step, wobble = np.zeros((size, size)), size, 100.0

    def mean(total: np.ndarray) -> np.ndarray:
        return total / 4 + wobble * rng.uniform(-wobble, wobble, total.shape)

    while step >= 2:
        half = step // 2
        corners = grid[::step, ::step]
        sums = corners + np.roll(corners, -1, 0)
        grid[half::step, half::step] = mean(sums + np.roll(sums, -1, 1))
        centers = grid[half::step, half::step]
        above = centers + np.roll(centers, 1, 0) + corners + np.roll(corners, -1, 1)
        grid[::step, half::step] = mean(above)
        beside = centers + np.roll(centers, 1, 1) + corners + np.roll(corners, -1, 0)
        grid[half::step, ::step] = mean(beside)
        step, wobble = half, wobble / decay
    grid -= grid.min()
    return grid / grid.max()
