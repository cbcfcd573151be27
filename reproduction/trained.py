"""Experiments that compare trained models: figures 3, 4, 5 and 8, table 8, heads and transfer.

Every experiment has two functions: its jobs, and its report on their results. Grids and text are in
experiments.toml, whose braces refer to the values that the report functions pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reproduction import jobs
from reproduction import results as stats
from reproduction.figures import Lines, Point
from reproduction.jobs import PROTOCOL, Datasets, Job, Key, finetuning, pretraining, small_model
from reproduction.published import DATA, TABLE6, TABLE8
from reproduction.report import TEXT, Report
from reproduction.results import Mean, Results, average, equality_verdict, parts_verdict, slope
from vitrail.data.datasets import open_dataset
from vitrail.planning.flops import cost_of
from vitrail.training.config import ModelSettings

FAMILIES = ("ViT", "hybrid", "BiT", "Mixer")
PRETRAINED, SCRATCH = "pre-trained", "from scratch"
LABELS, MASKED = "labels", "masked patches"
CLASS_TOKEN, MEAN_POOL = "class token", "mean of patches"
EQUAL = 0.02  # of accuracy: heads that differ by less are equally good


def subset_sizes(datasets: Datasets, transfer: bool) -> list[tuple[str, int, int | None]]:
    """Return models, numbers of images, and the same for jobs: None for all, as elsewhere."""
    grid, half = TEXT["figure4"], "even" if transfer and not datasets.target else ""
    images = jobs.select_half(open_dataset(datasets.pretrain, "train"), half)
    whole, least = len(images), max(grid["min_images"], len(images.classes))
    counts = [max(least, round(share * whole)) for share in grid["fractions"]]
    return [
        (model, counts[place], None if counts[place] == whole else counts[place])
        for model, places in grid["models"].items()
        for place in places
    ]


def figure4_jobs(datasets: Datasets) -> dict[Key, Job]:
    return {
        (name, count, seed): pretraining(datasets, small_model(name), seed, images=images)
        for seed in range(TEXT["figure4"]["seeds"])
        for name, count, images in subset_sizes(datasets, transfer=False)
    }


def figure3_jobs(datasets: Datasets) -> dict[Key, Job]:
    grid, listed, transfer = TEXT["figure3"], {}, not datasets.probes
    for seed in range(datasets.seeds("figure3")):
        for name, count, images in subset_sizes(datasets, transfer):
            if name in grid["models"]:
                model = small_model(name)
                start = pretraining(datasets, model, seed, images=images, transfer=transfer)
                for draw in range(grid["draws"] if transfer else 1):
                    fine = finetuning(datasets, start, ModelSettings(), grid["draws"] * seed + draw)
                    listed[name, count, draw, seed] = fine if transfer else start
    return listed


def figure4(results: Results) -> Report:
    means = results.fewshot
    small, large = leads_at_ends(means, "ViT M", "BiT S"), leads_at_ends(means, "ViT L", "BiT M")
    first, last = map(average, zip(small, large, strict=True))
    flops = {key[0]: cost_of(result.config).forward for key, result in results.jobs.items()}
    compute = ", ".join(f"{name} {value / 1e6:.0f} MFLOPs" for name, value in flops.items())
    values = {"small": small, "large": large, "compute": compute}
    return subset_report(results, parts_verdict([-first, last, last - first]), values, means)


def figure3(results: Results) -> Report:
    draws: dict[Key, list[Any]] = {}  # two fine-tunings of one model are not two models
    for (name, count, _, seed), result in results.jobs.items():
        score = result.fewshot if results.datasets.probes else result.accuracy
        draws.setdefault((name, count, seed), []).append(score)
    means = stats.pooled_means({key: sum(values) / len(values) for key, values in draws.items()})
    first, last = leads_at_ends(means, "ViT L", "ViT M")
    sizes: dict[str, float] = TEXT["figure3"]["dataset_sizes"]
    rows = {data: DATA["table5"]["accuracy"][data]["ImageNet"] for data in sizes}
    published = {
        model: [Point(sizes[data], row[n] / 100) for data, row in rows.items() if n < len(row)]
        for n, model in enumerate(DATA["table5"]["models"])
    }
    values = {"first": first, "last": last, "means": means}
    if not results.datasets.probes:
        values["measure"] = TEXT["figure3"]["finetuned"].format_map(
            {**PROTOCOL, **TEXT["figure3"], **results.datasets.names}
        )
        values["score"] = f"accuracy on {results.datasets.names['target']}"
    parts = [-first, last, last - first]
    return subset_report(results, parts_verdict(parts), values, means, published)


def leads_at_ends(means: dict[Key, Mean], one: str, other: str) -> list[Mean]:
    """Return the lead of one model over another with the smallest and with the largest set."""
    counts = sorted({key[1] for key in means})
    return [means[one, count] - means[other, count] for count in (counts[0], counts[-1])]


def subset_report(
    results: Results, verdict: Any, values: dict[str, Any], means: dict[Key, Mean], *lines: Lines
) -> Report:
    """Report on means by model and number of images."""
    counts = sorted({key[1] for key in means})
    *first, last = (f"{count:,}" for count in counts)
    names = list(dict.fromkeys(key[0] for key in means))
    measured = {n: [mean.point(k[1]) for k, mean in means.items() if k[0] == n] for n in names}
    rows = [(n, *(means[n, x].text if (n, x) in means else "" for x in counts)) for n in names]
    values = {**values, "counts": f"{', '.join(first)} and {last}"}
    head = ("model", *first, last)
    return results.report(verdict, values, rows, head=head, lines=[*lines, measured])


def figure5(results: Results) -> Report:
    means, tested, few = results.score, results.accuracy, results.fewshot
    flops = {k[:2]: r.images * cost_of(r.config).training for k, r in results.jobs.items()}
    measured = {
        family: sorted(
            mean.point(flops[key] / 1e12) for key, mean in means.items() if key[0] == family
        )
        for family in FAMILIES
    }
    gaps = {name: leads_over(measured["ViT"], measured[name]) for name in FAMILIES if name != "ViT"}
    values = {name: sum(gap) / len(gap) for name, gap in gaps.items()}
    values["first"] = -gaps["hybrid"][0]
    one = next(iter(means.values()))  # the CI is that of a difference between two models
    leads = {k: replace(one - one, values=(x,) * len(one.values)) for k, x in values.items()}
    published: dict[str, list[Point]] = {"ViT": [], "hybrid": [], "BiT": []}
    for row in sorted(TABLE6, key=lambda row: row.exaflops):
        family = row.family.replace("ResNet", "BiT")
        published[family].append(Point(row.exaflops, row.average / 100))
    rows = [(" ".join(k), f"{flops[k] / 1e12:.2f}", tested[k].text, few[k].text) for k in means]
    texts = {"leads": {k: mean.signed for k, mean in leads.items()}, "flops": flops}
    verdict = parts_verdict([leads["BiT"], leads["first"]])
    return results.report(verdict, texts, rows, lines=[published, measured])


def leads_over(one: Sequence[Point], other: Sequence[Point]) -> list[float]:
    """Return the lead of one family at nine budgets, evenly spaced in log FLOPs over the range
    that both cover; accuracies are interpolated linearly."""
    low, high = max(one[0].x, other[0].x), min(one[-1].x, other[-1].x)
    budgets = np.linspace(np.log(low), np.log(high), 9)
    curves = (np.transpose(curve) for curve in (one, other))
    first, second = (np.interp(budgets, np.log(x), y) for x, y, *_ in curves)
    return (first - second).tolist()


def figure8(results: Results) -> Report:
    means, tested, few = results.score, results.accuracy, results.fewshot
    costs = {key[:-1]: cost_of(result.config) for key, result in results.jobs.items()}
    order = sorted(means, key=lambda key: costs[key].forward)
    lines = {
        axis: [(costs[key].forward / 1e6, means[key]) for key in order if key[0] in ("base", axis)]
        for axis in dict.fromkeys(key[0] for key in means if key[0] != "base")
    }
    slopes = {axis: slope(line) for axis, line in lines.items()}
    rows = []
    for key in means:
        size = (f"{costs[key].parameters:,}", f"{costs[key].forward / 1e6:.1f}")
        rows.append((*key, *size, tested[key].text, few[key].text))
    verdict = parts_verdict([slopes["depth"] - slopes["width"], slopes["patch"]])
    values = {"slopes": ", ".join(f"{axis} {value.signed}" for axis, value in slopes.items())}
    points = {axis: [mean.point(x) for x, mean in line] for axis, line in lines.items()}
    return results.report(verdict, values, rows, lines=[points])


def heads(results: Results) -> Report:
    means, tested, few = results.score, results.accuracy, results.fewshot
    rates = dict(sorted(means, key=lambda key: means[key].mean))  # head → that of its best mean
    best = {head: means[head, rate] for head, rate in rates.items()}
    gap = best[MEAN_POOL] - best[CLASS_TOKEN]
    same_rate = "As in the paper, each needs its own learning rate."
    if rates[MEAN_POOL] == rates[CLASS_TOKEN]:
        same_rate = "Unlike in the paper, both prefer the same learning rate."
    seen = f"{next(iter(results.jobs.values())).images:,}"
    values = {"best": best, "rates": rates, "gap": gap, "same_rate": same_rate, "seen": seen}
    rows = [(key[0], f"{key[1]:g}", tested[key].text, few[key].text) for key in means]
    names = {key: f"{key[0]}, rate {key[1]:g}" for key in means}
    dots = [{names[key]: table[key].point() for key in means} for table in (tested, few)]
    return results.report(equality_verdict(gap, EQUAL), values, rows, dots=dots)


def table8(results: Results) -> Report:
    means, tested = results.fewshot, results.accuracy
    kinds, places = TEXT["table8"]["kinds"], TEXT["table8"]["places"]
    none = means["none", "stem"]
    others = {key: mean for key, mean in means.items() if key != ("none", "stem")}
    gains = {key: mean - none for key, mean in others.items()}
    gain = average(list(others.values())) - none
    worst, best = (pick(others.values(), key=lambda mean: mean.mean) for pick in (min, max))
    names = {key: f"{kinds[key[0]]} ({places[key[1]]})" for key in TABLE8}
    names |= {("none", "stem"): "none", ("relative", "every-layer"): "relative"}
    clear = [names[key] for key in gains if gains[key].low > 0]
    rows = []
    for (kind, place), value in TABLE8.items():
        where = "in attention" if kind == "relative" else places[place]
        more = gains[kind, place].signed if kind != "none" else ""
        cells = (f"{100 * value:.2f}", means[kind, place].text, more, tested[kind, place].text)
        rows.append((kinds[kind], where, *cells))
    spread = best - worst
    values = {"none": none, "gain": gain, "spread": spread, "clear_count": len(clear)}
    values["clear"] = ", ".join(clear) or "none"
    published = {names[key]: Point(0, value) for key, value in TABLE8.items()}
    dots = [published, {names[key]: means[key].point() for key in TABLE8}]
    return results.report(parts_verdict([gain, gain - spread]), values, rows, dots=dots)


def transfer_jobs(datasets: Datasets) -> dict[Key, Job]:
    sizes, listed = TEXT["transfer"]["sizes"], {}
    models = {size: small_model("ViT M", patch_size=4, image_size=size) for size in sizes}
    for seed in range(TEXT["transfer"]["seeds"]):
        start = pretraining(datasets, models[sizes[0]], seed, transfer=True)
        for size, model in models.items():
            resized = ModelSettings(image_size=size)
            listed[PRETRAINED, size, seed] = finetuning(datasets, start, resized, seed)
            listed[SCRATCH, size, seed] = finetuning(datasets, None, model, seed)
    return listed


def transfer(results: Results) -> Report:
    means, sizes = results.accuracy, TEXT["transfer"]["sizes"]
    gains = {size: means[PRETRAINED, size] - means[SCRATCH, size] for size in sizes}
    gain = average(list(gains.values()))
    larger = means[PRETRAINED, sizes[-1]] - means[PRETRAINED, sizes[0]]
    values = {"gains": gains, "gain": gain, "larger": larger}
    rows = [(how, *(means[how, size].text for size in sizes)) for how in (PRETRAINED, SCRATCH)]
    head = ("", *(f"{size} pixels" for size in sizes))
    lines = {how: [means[how, s].point(s) for s in sizes] for how in (PRETRAINED, SCRATCH)}
    return results.report(parts_verdict([gain, larger]), values, rows, head=head, lines=[lines])


def selfsupervised_jobs(datasets: Datasets) -> dict[Key, Job]:
    model, listed = small_model("ViT M"), {}
    for seed in range(TEXT["selfsupervised"]["seeds"]):
        for how, objective in ((LABELS, "classify"), (MASKED, "masked-patches")):
            start = pretraining(datasets, model, seed, objective=objective, transfer=True)
            listed[how, seed] = finetuning(datasets, start, ModelSettings(), seed)
        listed[SCRATCH, seed] = finetuning(datasets, None, model, seed)
    return listed


def selfsupervised(results: Results) -> Report:
    means, few = results.accuracy, results.fewshot
    published = TEXT["selfsupervised"]["published"]
    over_scratch = means[MASKED,] - means[SCRATCH,]
    under_labels = means[LABELS,] - means[MASKED,]
    values = {"over_scratch": over_scratch, "under_labels": under_labels}
    rows = [(k, f"{100 * x:.1f}", means[k,].text, few[k,].text) for k, x in published.items()]
    dots = [{how: Point(0, value) for how, value in published.items()}]
    dots.append({how: means[how,].point() for how in published})
    return results.report(parts_verdict([*values.values()]), values, rows, dots=dots)
