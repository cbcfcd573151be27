"""A command of the pages made so small that it takes a moment; what it does stays the same."""

from pathlib import Path

from vitrail.models.registry import CONFIGURATIONS

# What the pages speak of, and what stands for it here.
STANDS_FOR = {"builtin:sign-digits": "pictures/", "/data/imagenet": "pictures/"}
STANDS_FOR |= {"runs/digits": "runs/pictures", "ViT-L_16.npz": "ViT-B_16.npz"}
# Options whose values are replaced where they are given.
LESS = {
    "--minutes": "0.01",
    "--epochs": "0.2",
    "--steps": "2",
    "--batch-size": "4",
    "--seeds": "2",
    "--images": "4",
    "--image-size": "32",
    "--port": "0",
    "--error-rate": "0.4",
}
# Options that a fresh model is made small by, given or not.
SMALL = {"--model.depth": "1", "--model.width": "32", "--model.mlp-width": "64"}
SMALL |= {"--model.heads": "2"}
# Options that a run is made short by where nothing says how long it is.
LENGTHS = ("--minutes", "--epochs", "--steps")
RUN = {"--batch-size": "4", "--optim.warmup-steps": "0"}


def shrunk(argv: list[str]) -> list[str]:
    """The words of a command, changed as little as needed."""
    verb, words = "".join(argv[:1]), [STANDS_FOR.get(word, word) for word in argv]
    if verb == "plan":
        return planned(words)
    if {"--print-settings", "--resume", "--help"} & set(words):
        return words
    if verb == "doctor":
        return [*words, "--no-measure"]
    for option, value in LESS.items():
        words = with_option(words, option, value, add=False)
    more: dict[str, str] = {}
    if verb in ("train", "finetune"):
        more = RUN if set(LENGTHS) & set(words) else RUN | {"--steps": "2"}
    if verb == "train":
        more = more | SMALL
    if verb == "vtab" and "--method" not in words:
        more = {"--steps": "2", "--batch-size": "4", "--image-size": "32"}
    if verb == "serve":
        more = {"--port": "0"}
    for option, value in more.items():
        words = with_option(words, option, value, add=True)
    return words


def planned(words: list[str]) -> list[str]:
    """A plan of a small model, without trying it."""
    words = ["ViT-Mu/16" if word in CONFIGURATIONS else word for word in words]
    if "--data" in words:
        words = with_option(words, "--batch-size", LESS["--batch-size"], add=False)
    return words if "--no-probe" in words else [*words, "--no-probe"]


def with_option(words: list[str], option: str, value: str, *, add: bool) -> list[str]:
    """The words with an option's value replaced; an option that is not there may be added."""
    if option in words:
        place = words.index(option) + 1
        return [*words[:place], value, *words[place + 1 :]]
    return [*words, option, value] if add else words


def written_by(argv: list[str]) -> list[Path]:
    """What a command makes, and what must not be there before."""
    if "--resume" in argv:
        return []
    names = ("--out", "--save-temperature", "--teach-to")
    return [Path(argv[argv.index(name) + 1]) for name in names if name in argv]
