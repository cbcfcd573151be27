"""Tables 1, 2, 5 and 6: published numbers next to what can be computed or measured.

Accuracies of tables 2 and 5 are measured where weights and data are given. Weights may be for one
dataset only, since the paper fine-tunes a model for each:

    {"ViT-L/16 (ImageNet-21k)": "hf:…", "ViT-L/16 (ImageNet-21k)@CIFAR-10": "runs/cifar"}

ImageNet ReaL is a file of labels for the images of ImageNet, which must be given as well.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from reproduction import published as paper
from reproduction.figures import Point
from reproduction.published import DATA, REAL, TABLE2, Accuracy
from reproduction.report import TEXT, Report, Table
from reproduction.results import Results, rules_verdict
from vitrail.errors import ConfigError, unknown
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.metrics import Estimate
from vitrail.models.config import Config, VitConfig
from vitrail.models.registry import configuration
from vitrail.planning.flops import DAY, EXA, TPU_V3_CORE, Cost, cost_of

WAYS = ("without a head", "with a head")  # to count parameters
MARGIN = 2  # published standard deviations outside our CI that still agree
MAX_DIFFERENCE = 3  # percent, up to which computed and published FLOPs agree


def without_head(config: Config) -> Config:
    if isinstance(config, VitConfig):
        return config.change(num_classes=0, representation=0, dropout=0.0)
    return config.change(num_classes=0)


def trunk_cost(config: Config, image_size: int | None = None) -> Cost:
    """Return FLOPs and tokens of a model without its head."""
    return cost_of(without_head(config), image_size)


def pretraining_exaflops(model: str, images: float, epochs: float) -> float:
    """Return the compute of pre-training at 224 pixels, without the head."""
    return images * epochs * trunk_cost(configuration(model)).training / EXA


def millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M"


def table1(results: Results) -> Report:
    rows = []
    for size, models in TEXT["table1"]["models"].items():
        published = DATA["table1"].get(size)
        shape = [str(value) for value in published.values()] if published else ["-"] * 5
        if published:
            shape[-1] = f"{float(shape[-1]) / 1e6:.0f} M"
        for model in models:
            config = configuration(model)
            cost = trunk_cost(config)
            counts = [cost_of(one).parameters for one in (without_head(config), config)]
            same = [f"{count / 1e6:.0f} M" == shape[-1] for count in counts]
            agrees = ", ".join(compress(WAYS, same)) or ("no" if published else "-")
            work = (str(cost.tokens or "-"), f"{cost.forward / 1e9:,.1f}")
            rows.append((model, *shape, *map(millions, counts), agrees, *work))
    return results.report(TEXT["table1"]["verdict"], {}, rows)


class Measurement(NamedTuple):
    """An accuracy in percent, published and measured."""

    model: str
    data: str
    published: Accuracy
    ours: Estimate
    images: int

    @property
    def agrees(self) -> bool:
        """Whether the published value is in our CI or close to it."""
        margin = MARGIN * (self.published.deviation or 0.0)
        return self.ours.low - margin <= self.published.value <= self.ours.high + margin


def measure_weights(
    weights: Mapping[str, str], data: Mapping[str, str], table: str
) -> list[Measurement]:
    """Evaluate every model on the test images of every dataset that it is for."""
    published = paper.WITH_ACCURACIES[table]
    known = {target for row in published.values() for target in row}
    if wrong := data.keys() - known:
        raise unknown(f"dataset of {table}", min(wrong), known)
    if "VTAB" in data:
        raise ConfigError("VTAB is a mean of 19 tasks; measure it with `vitrail vtab`")
    if REAL in data and "ImageNet" not in data:
        raise ConfigError(f"{REAL} is a set of labels for the images of ImageNet; give both")
    measurements = []
    for key, reference in weights.items():
        name, _, only = key.partition("@")
        model = paper.full_name(table, name)
        targets = [only] if only else [target for target in data if target != REAL]
        if not set(targets) <= data.keys():
            listed = ", ".join(data) or "none"
            raise ConfigError(f"weights of {name} are for {only}, but --data has: {listed}")
        if not targets:
            raise ConfigError(f"{name} needs data, such as --data ImageNet=/data/imagenet")
        for target in targets:
            real = data.get(REAL) if target == "ImageNet" else None
            evaluation = evaluate(reference, data[target], real=real)
            for labels, metric in ((target, "accuracy"), (REAL, "real_accuracy")):
                if metric in evaluation.estimates and labels in published[model]:
                    ours = Estimate(*(100 * x for x in evaluation.estimates[metric]))
                    numbers = (published[model][labels], ours, evaluation.samples)
                    measurements.append(Measurement(model, labels, *numbers))
    return measurements


def measured_report(
    results: Results,
    measurements: Sequence[Measurement],
    rows: Sequence[Sequence[str]],
    head: Sequence[str],
    tables: Sequence[Table],
) -> Report:
    """Return the report of table 2 or 5, with what was measured for it."""
    verdict = TEXT[results.name]["verdict"]
    text = "No accuracy was measured: that needs weights and data."
    if measurements:
        agrees, ours = [one.agrees for one in measurements], []
        verdict = rules_verdict(agrees)
        text = (
            f"{sum(agrees)} of {len(agrees)} measured accuracies agree with the published ones, "
            f"which are in our 95 % CI or within {MARGIN} published standard deviations of it."
        )
        for m in measurements:
            value = (f"{m.ours.value:.2f}", f"{m.ours.low:.2f} to {m.ours.high:.2f}")
            answer = "yes" if m.agrees else "no"
            ours.append((m.model, m.data, str(m.published), *value, f"{m.images:,}", answer))
        names = ("model", "data", "published", "here", "95 % CI", "images", "agrees")
        tables = [*tables, Table("Published and measured here", names, ours)]
    values = {"measured": text, "measurements": measurements}
    return results.report(verdict, values, rows, head=head, tables=tables)


def utilizations() -> dict[tuple[str, int], tuple[float, float]]:
    """Return (column, epochs) → exaFLOPs, and the share of a TPUv3 core's peak they imply."""
    shares = {}
    for column, model, images, epochs, _ in map(dict.values, TEXT["table2"]["trainings"]):
        flops = pretraining_exaflops(model, images, epochs)
        peak = paper.CORE_DAYS[column] * DAY * TPU_V3_CORE.peak
        shares[column, epochs] = (flops, flops * EXA / peak)
    return shares


def table2(results: Results, measurements: Sequence[Measurement] = ()) -> Report:
    models, tasks = DATA["table2"]["models"], DATA["table2"]["accuracy"]
    rows = [(task, *(str(TABLE2[model].get(task, "-")) for model in models)) for task in tasks]
    rows.append(("TPUv3-core-days", *(f"{paper.CORE_DAYS[model]:,.0f}" for model in models)))
    costs = [
        (column, str(n), f"{flops:,.0f}", f"{paper.CORE_DAYS[column]:,.0f}", f"{100 * x:.0f} %")
        for (column, n), (flops, x) in utilizations().items()
    ]
    head = ("model", "epochs", "exaFLOPs", "core-days (published)", "utilization")
    table = Table("Computed: pre-training compute against the published core-days", head, costs)
    sizes = {training["model"]: training["size"] for training in TEXT["table2"]["trainings"]}
    extra = [table, resolution_table(sizes)]
    return measured_report(results, measurements, rows, ("data", *models), extra)


def table5(results: Results, measurements: Sequence[Measurement] = ()) -> Report:
    models = DATA["table5"]["models"]
    rows = [
        (data, task, *(f"{x:.2f}" for x in row), *["-"] * (len(models) - len(row)))
        for data, tasks in DATA["table5"]["accuracy"].items()
        for task, row in tasks.items()
    ]
    head = ("pre-trained on", "evaluated on", *models)
    extra = [resolution_table(dict.fromkeys(models, 384))]
    return measured_report(results, measurements, rows, head, extra)


def resolution_table(sizes: Mapping[str, int]) -> Table:
    """Return the cost of an image at 224 pixels and at the fine-tuning resolution."""
    rows = []
    for model, size in sizes.items():
        config = configuration(model)
        before = trunk_cost(config)
        tokens, flops, ratio = str(before.tokens), f"{before.forward / 1e9:,.1f}", "-"
        if isinstance(config, VitConfig) and size % config.stride[0] == 0:
            after = trunk_cost(config, size)
            tokens, flops = f"{tokens} → {after.tokens}", f"{flops} → {after.forward / 1e9:,.1f}"
            ratio = f"{after.forward / before.forward:.1f}"
        rows.append((model, millions(cost_of(config).parameters), str(size), tokens, flops, ratio))
    head = ("model", "parameters", "pixels", "tokens", "forward GFLOPs", "ratio")
    return Table("Computed: an image at 224 pixels and at the fine-tuning resolution", head, rows)


def table6(results: Results) -> Report:
    rows, texts, lines = [], [], [{}, {}]
    off: dict[str, list[float]] = {}
    for row in paper.TABLE6:
        flops = pretraining_exaflops(row.model, paper.JFT_IMAGES, row.epochs)
        deviation = 100 * (flops / row.exaflops - 1)
        size = millions(cost_of(configuration(row.model)).parameters)
        compute = (f"{row.exaflops:,.0f}", f"{flops:,.1f}", signed(deviation))
        rows.append((row.model, str(row.epochs), size, *compute))
        off.setdefault(row.family, []).append(deviation)
        for line, accuracy in zip(lines, (row.average, row.accuracies[0]), strict=True):
            line.setdefault(row.family, []).append(Point(row.exaflops, accuracy / 100))
    for family, errors in off.items():
        close = sum(abs(error) <= MAX_DIFFERENCE for error in errors)
        agree = f"{close} of {len(errors)} rows within {MAX_DIFFERENCE} %"
        texts.append(f"{family} {signed(min(errors))} to {signed(max(errors))} ({agree})")
    comparison = [
        (row["model"], str(row["epochs"]), f"{row['accuracy']:.2f}", f"{row['lead']:+.2f}", ratio)
        for row in DATA["table6"]["comparison"]
        for ratio in [f"{row['ratio']:.1f}" if row["ratio"] else "-"]
    ]
    head = ("model", "epochs", "accuracy", "lead over ViT", "compute relative to an equal ViT")
    caption = "Published mean accuracy of five datasets, compared with a ViT of equal compute"
    tables = [Table(caption, head, comparison)]
    values = {"deviations": ", ".join(texts), "off": off}
    return results.report(TEXT["table6"]["verdict"], values, rows, lines=lines, tables=tables)


def signed(percent: float) -> str:
    return f"{round(percent, 1) + 0.0:+.1f} %"  # no -0.0
