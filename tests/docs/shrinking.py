"""Make a command of the docs small: the same options, with less data, time and model."""

from pathlib import Path

from vitrail.models.registry import CONFIGURATIONS

# Names in the docs, and what is used in their place.
STANDS_FOR = {"builtin:sign-digits": "pictures/", "/data/imagenet": "pictures/"}
STANDS_FOR |= {"runs/digits": "runs/pictures", "ViT-L_16.npz": "ViT-B_16.npz"}
# Values of options, where these are given.
LESS = {"--minutes": "0.01", "--epochs": "0.2", "--steps": "2", "--batch-size": "4"}
LESS |= {"--seeds": "2", "--images": "4", "--image-size": "32", "--port": "0"}
LESS |= {"--error-rate": "0.4"}
# Options that are added: of every run, of a run without a length, and of a new model.
RUN = {"--batch-size": "4", "--optim.warmup-steps": "0"}
LENGTHS = {"--minutes", "--epochs", "--steps"}
SMALL = {"--model.depth": "1", "--model.width": "32", "--model.mlp-width": "64"}
SMALL |= {"--model.heads": "2"}


def shrunk(argv: list[str]) -> list[str]:
    """The arguments of a command, changed as little as needed."""
    verb, words = "".join(argv[:1]), [STANDS_FOR.get(word, word) for word in argv]
    if verb == "plan":
        words = ["ViT-Mu/16" if word in CONFIGURATIONS else word for word in words]
        if "--data" in words:
            words = with_options(words, {"--batch-size": "4"}, add=False)
        return words if "--no-probe" in words else [*words, "--no-probe"]
    if {"--print-settings", "--resume", "--help"} & set(words):
        return words
    if verb == "doctor":
        return [*words, "--no-measure"]
    if verb == "train" and "--search" in words:  # several runs: their lengths, not the sum
        words = ["--steps" if word == "--minutes" else word for word in words]
    words, more = with_options(words, LESS, add=False), {}
    if verb in ("train", "finetune"):
        more = RUN if LENGTHS & set(words) else RUN | {"--steps": "2"}
    if verb == "train":
        more = more | SMALL
    if verb == "vtab" and "--method" not in words:
        more = {"--steps": "2", "--batch-size": "4", "--image-size": "32"}
    if verb == "serve":
        more = {"--port": "0"}
    return with_options(words, more, add=True)


def with_options(words: list[str], values: dict[str, str], *, add: bool) -> list[str]:
    """Replace the values of options, and `add` those that are not there."""
    words = list(words)
    for option, value in values.items():
        if option in words:
            words[words.index(option) + 1] = value
        elif add:
            words += [option, value]
    return words


def written_by(argv: list[str]) -> list[Path]:
    """What a command makes, and what must not be there before."""
    if "--resume" in argv:
        return []
    names = ("--out", "--save-temperature", "--teach-to")
    return [Path(argv[argv.index(name) + 1]) for name in names if name in argv]
