"""Forward pass and training step of the same ViT in five libraries, and its products alone."""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from peers import LIBRARIES, Shape, make_torchvision_importable
from timing import claim, interleave, matrix_call, matrix_rate, spread

ROUNDS = 15
PRODUCTS, DATA_PARALLEL = "products alone", "vitrail, data parallel"
PRODUCTS_PARALLEL = "products alone, data parallel"
CASES = {
    "ViT-S/16 at 224, batch 8": (Shape(224, 16, 384, 12, 6, 1536, 1000), 8),
    "32 pixels, patch 4, width 128, depth 6, batch 128": (Shape(32, 4, 128, 6, 4, 512, 10), 128),
}


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    make_torchvision_importable()
    lines = [
        "## Models",
        "",
        "The same network in five libraries, each with its own defaults (the peers compute the",
        "exact GELU, vitrail the authors' tanh form). A training step is forward, cross-entropy,",
        f"backward and fused AdamW. Interleaved, {ROUNDS} rounds. *Ratio* is the median over",
        "rounds of the library's time divided by vitrail's: above 1, vitrail is faster. *Share* is",
        "how much of the machine's best float32 matrix-product rate the plain network's products",
        "make up; vitrail skips those of the last block whose output is unused. *Products alone*",
        "are the network's matrix products and nothing else, computed in sequence by torch in",
        "preallocated memory: a lower bound on the time of a step. *Data parallel* is the step of",
        "`vitrail train` on a CPU, where each core computes a shard of the batch",
        "(`training/cpu_parallel.py`).",
        "",
    ]
    for title, (shape, batch) in CASES.items():
        for kind, passes in (("forward", 1), ("training step", 3)):
            print(f"  {title}: {kind}", flush=True)
            rows = table(f"{title}, {kind}", shape, batch, passes)
            lines += [f"### {title}: {kind}", "", *rows, ""]
    return "\n".join(lines)


def table(what: str, shape: Shape, batch: int, passes: int) -> list[str]:
    images = torch.randn(batch, 3, shape.image_size, shape.image_size)
    labels = torch.randint(shape.classes, (batch,))
    make = forward_call if passes == 1 else step_call
    calls = {name: make(build(shape), images, labels) for name, build in LIBRARIES.items()}
    if passes > 1:
        calls[DATA_PARALLEL] = data_parallel_call(LIBRARIES["vitrail"](shape), images, labels)
        calls[PRODUCTS_PARALLEL] = sharded_products_call(shape, batch, passes)
    calls |= {PRODUCTS: products_call(shape, batch, passes), "matrix": matrix_call()}
    seconds = interleave(calls, rounds=ROUNDS)
    rate = matrix_rate(seconds.pop("matrix"))
    ours = seconds["vitrail"]
    rows = ["| library | best, ms | median, ms | ratio | share |", "|---|---|---|---|---|"]
    ratios, shares = {}, {}
    for name, times in sorted(seconds.items(), key=lambda item: min(item[1])):
        ratios[name] = statistics.median(t / own for t, own in zip(times, ours, strict=True))
        shares[name] = passes * batch * shape.forward_flops() / min(times) / rate
        rows.append(f"| {name} | {spread(times)} | {ratios[name]:.2f} | {shares[name]:.0%} |")
    peer = min(LIBRARIES.keys() - {"vitrail"}, key=lambda name: ratios[name])
    comparison = f"{peer} takes {ratios[peer]:.2f} times vitrail's time"
    share = f"{shares['vitrail']:.0%} of the matrix-product limit"
    if DATA_PARALLEL in shares:
        pairs = zip(seconds[peer], seconds[DATA_PARALLEL], strict=True)
        ratio = statistics.median(t / own for t, own in pairs)
        comparison += f", {ratio:.2f} times the data-parallel one"
        share += f", {shares[DATA_PARALLEL]:.0%} data parallel"
    return [
        claim(f"{what}, the fastest peer", f"{comparison}; {share}"),
        "",
        *rows,
        "",
        f"Best matrix product of the machine: {rate / 1e9:.0f} Gflop/s.",
    ]


def products_call(shape: Shape, batch: int, passes: int) -> Callable[[], object]:
    """The matrix products of a forward pass, or of a whole step, one after the other."""
    rows, width, heads = batch * shape.tokens, shape.width, shape.heads
    layers = [(width, 3 * width), (width, width), (width, shape.mlp_width)]
    layers.append((shape.mlp_width, width))
    size = max(max(layer) for layer in layers)
    tokens, out, back = torch.randn(rows * size), torch.empty(rows * size), torch.empty(rows * size)
    weight, result = torch.randn(size * size), torch.empty(size * size)
    queries = torch.randn(batch * heads, shape.tokens, width // heads)
    scores = torch.randn(batch * heads, shape.tokens, shape.tokens)
    attended = torch.empty_like(queries)

    def dense(in_features: int, out_features: int) -> None:
        x, y = (
            tokens[: rows * in_features].view(rows, in_features),
            out[: rows * out_features].view(rows, out_features),
        )
        w = weight[: in_features * out_features].view(out_features, in_features)
        torch.mm(x, w.t(), out=y)
        if passes > 1:
            torch.mm(y, w, out=back[: rows * in_features].view(rows, in_features))
            torch.mm(
                y.t(), x, out=result[: out_features * in_features].view(out_features, in_features)
            )

    def call() -> None:
        for _ in range(shape.depth):
            for layer in layers:
                dense(*layer)
            for _ in range(passes):
                torch.bmm(queries, queries.mT, out=scores)
                torch.bmm(scores, queries, out=attended)

    return call


def sharded_products_call(shape: Shape, batch: int, passes: int) -> Callable[[], object]:
    """The same, with one shard of the batch per core."""
    from vitrail.data.loader import start_pool

    cores = torch.get_num_threads()
    pool = start_pool(cores, torch_threads=1, name="products")
    calls = [products_call(shape, batch // cores, passes) for _ in range(cores)]
    return lambda: [done.result() for done in [pool.submit(call) for call in calls]]


def forward_call(model: nn.Module, images: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    model.eval()

    def call() -> None:
        with torch.inference_mode():
            model(images)

    return call


def step_call(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    return step_of(model.train(), lambda: F.cross_entropy(model(images), labels))


def data_parallel_call(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], object]:
    """A training step with CPU data parallelism, as in the training loop."""
    from vitrail.training.auto_config import MAX_SHARDS
    from vitrail.training.config import LossSettings
    from vitrail.training.cpu_parallel import CpuDataParallel
    from vitrail.training.objectives import Classification

    objective = Classification(model, LossSettings(kind="softmax"))  # pyright: ignore
    loss = CpuDataParallel(objective, min(MAX_SHARDS, torch.get_num_threads()))
    return step_of(model.train(), lambda: loss(images, labels))


def step_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def call() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call
