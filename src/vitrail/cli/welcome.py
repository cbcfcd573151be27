"""The first words of `vitrail`: what it is, how to begin, and every command by what it is for."""

from vitrail import __version__

ABOUT = f"""\
vitrail {__version__}: the Vision Transformer, from a folder of pictures to a
classifier that is trained, measured, explained and in use.

Begin with one of these
  vitrail demo                           a model learns to read hands: 3 minutes
  vitrail train pictures/                your own: one folder for each class
  vitrail predict runs/pictures cat.jpg  what a picture shows
"""
# What each command is for, in what is left of a line beside the group and the name.
GROUPS = {
    "Your pictures": {
        "check": "what is wrong with them: unreadable, double, leaked",
        "pack": "many small files into a few large ones",
    },
    "Train": {
        "demo": "a small model, on photographs that come along",
        "train": "a model from scratch; settings come from the data",
        "finetune": "a trained model fitted to your pictures",
        "fewshot": "a classifier from a few pictures of each class",
        "teach": "one more class, from a handful of pictures",
        "models": "every model that has a name",
        "recipes": "settings to begin with",
        "plan": "what a training will take, before it begins",
    },
    "Judge": {
        "evaluate": "how good a model is, how sure, and where it fails",
        "vtab": "many small tasks, and the mean over them",
    },
    "Look inside": {
        "inspect": "attention, filters, and whether the maps are true",
    },
    "Use": {
        "predict": "what pictures show",
        "serve": "a model over HTTP, and a page to try it",
        "export": "a file that runs without vitrail",
        "convert": "a checkpoint in somebody else's format",
    },
    "The paper": {
        "reproduce": "its tables and figures at laptop scale",
    },
    "This machine": {
        "doctor": "what it is, what is fast on it, what is wrong",
        "completion": "commands and options by the Tab key",
    },
}
MORE = """\
vitrail COMMAND --help    all options of a command; each takes --quiet and
                          --verbose, most take --json"""
GROUP, NAME = 15, 12  # columns


def welcome() -> str:
    """All of it."""
    lines = [ABOUT]
    for group, commands in GROUPS.items():
        for place, (name, words) in enumerate(commands.items()):
            lines.append(f"{'' if place else group:{GROUP}}{name:{NAME}}{words}")
    return "\n".join([*lines, "", MORE])
