"""The results of an experiment's jobs, and the report that is made of them and its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reproduction.figures import Lines, Panel, Point, dot_chart, line_chart
from reproduction.jobs import PROTOCOL, Datasets, Key, Result
from reproduction.report import TEXT, Figure, Report, Table, Verdict
from reproduction.stats import Mean, pooled_means

PUBLISHED = ("table1", "table2", "table5", "table6")  # experiments that train nothing


@dataclass(frozen=True)
class Results:
    """The result of each job of an experiment."""

    name: str
    datasets: Datasets
    jobs: Mapping[Key, Result] = field(default_factory=dict)

    @cached_property
    def accuracy(self) -> dict[Key, Mean]:
        """Key without seed → test accuracy."""
        return pooled_means({key: result.accuracy for key, result in self.jobs.items()})

    @cached_property
    def fewshot(self) -> dict[Key, Mean]:
        """Key without seed → few-shot accuracy."""
        return pooled_means({key: result.fewshot for key, result in self.jobs.items()})

    @property
    def score(self) -> dict[Key, Mean]:
        """What models are compared by: test accuracy, or few-shot accuracy on other datasets."""
        return self.fewshot if self.datasets.probes else self.accuracy

    def report(
        self,
        verdict: Verdict,
        values: Mapping[str, Any],
        rows: Sequence[Sequence[str]],
        head: Sequence[str] = (),
        lines: Sequence[Lines] = (),
        dots: Sequence[Mapping[str, Point]] = (),
        tables: Sequence[Table] = (),
        figures: Mapping[str, bytes] | None = None,
    ) -> Report:
        """Fill `values` into the experiment's text; rows and points into its table and chart."""
        text, figures = TEXT[self.name], dict(figures or {})
        counts = sorted({result.test_images for result in self.jobs.values()})
        tested = {"test_images": " to ".join(f"{count:,}" for count in counts)}
        context = {**PROTOCOL, **self.datasets.names, **text, **tested, **values}

        def fill(template: str) -> str:
            return template.format_map(context)

        context["measure"] = fill(context["measure"])

        if lines:
            panels = []
            for panel, content in zip(text["panels"], lines, strict=True):
                labels = {key: fill(panel[key]) for key in ("title", "x_label", "y_label")}
                panels.append(Panel(**{**panel, **labels}, lines=content))
            figures[f"{self.name}.svg"] = line_chart(panels)
        if dots:
            columns = dict(zip(map(fill, text["columns"]), dots, strict=True))
            figures[f"{self.name}.svg"] = dot_chart(columns)
        captions = text.get("figures", {})
        data = {key: value for key, value in values.items() if not isinstance(value, str)}
        if "seeds" in text:
            data |= {"accuracy": self.accuracy, "fewshot": self.fewshot}
        return Report(
            name=self.name,
            title=text["title"],
            claim=text["claim"],
            method=fill(text["method"]),
            result=fill(text["result"]),
            verdict=verdict,
            tables=[Table(fill(text["table"]), [*map(fill, head or text["head"])], rows), *tables],
            figures=[
                Figure(file, captions.get(file) or text["figure"], content)
                for file, content in figures.items()
            ],
            data=data,
            published=self.name in PUBLISHED,
        )
