"""The model card: what a bundle is, for people."""

from vitrail.checkpoints.facts import Facts
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import build
from vitrail.models.config import BitConfig, Config, VitConfig, pair
from vitrail.models.registry import name_of
from vitrail.words import listed

GENERATED = "<!-- made by vitrail; saving again rewrites it unless this line is gone -->"
SHOWN_CLASSES = 20


def model_card(config: Config, facts: Facts, folder: str) -> str:
    """README.md of a bundle."""
    height, width = pair(config.image_size)
    prepare = facts.preprocessing
    rows = {
        "architecture": name_of(config),
        "parameters": f"{sum(p.numel() for p in build(config).parameters()):,}",
        "image": f"{height} x {width} pixels, {config.channels} channels",
        "classes": f"{config.num_classes:,}" if config.num_classes else "none: it gives features",
        "numerics": ", ".join(numerics_words(config)),
        "resize": resize_words(prepare),
        "normalization": normalization_words(prepare),
    }
    rows |= {
        key.replace("_", " "): str(value)
        for key, value in facts.provenance.items()
        if isinstance(value, str | int | float)  # lists are for programs
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""{GENERATED}
# {folder}

{name_of(config)}, saved by vitrail.

| | |
|---|---|
{table}

```python
import vitrail

model = vitrail.load("{folder}").eval()
logits = model(images)  # (batch, {config.channels}, {height}, {width}), normalized as above
```
{class_words(facts)}"""


def numerics_words(config: Config) -> list[str]:
    numerics = config.numerics
    if isinstance(config, BitConfig):
        return [f"GroupNorm epsilon {numerics.group_norm_eps:g}"]
    swiglu = isinstance(config, VitConfig) and config.mlp == "swiglu"
    hidden = "SwiGLU" if swiglu else f"{numerics.gelu} GELU"
    return [hidden, f"LayerNorm epsilon {numerics.norm_eps:g}"]


def normalization_words(prepare: Preprocessing) -> str:
    return f"mean {numbers(prepare.mean)}, std {numbers(prepare.std)}"


def resize_words(prepare: Preprocessing) -> str:
    high, wide = prepare.resize_to or prepare.size
    how = f"both sides to {high} x {wide}"
    if prepare.resize == "short-side":
        how = f"short side to {min(high, wide)}"
    height, width = prepare.size
    cut = "" if prepare.resize_to is None else f", center crop {height} x {width}"
    smooth = "" if prepare.antialias else ", no antialiasing"
    return f"{how} ({prepare.interpolation}{smooth}){cut}"


def class_words(facts: Facts) -> str:
    names = facts.class_names
    if not names:
        return ""
    return f"\nClasses: {listed(names, SHOWN_CLASSES)}.\n"


def numbers(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"
