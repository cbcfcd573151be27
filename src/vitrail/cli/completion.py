"""`vitrail completion`: the shell completes commands, options and their values.

The scripts hold all the words, so that the Tab key starts no Python. tyro writes scripts too, but
after a command those complete no files, which is what most of our commands want.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from shlex import quote
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from vitrail.cli.reproduce import ALL, NAMES
from vitrail.cli.welcome import GROUPS
from vitrail.models.registry import CONFIGURATIONS
from vitrail.training.recipes import recipe_names

Shell = Literal["bash", "zsh", "fish"]
# Command → option → what it may be: () for anything, None if nothing comes after it. The option ""
# is what comes without one.
Words = dict[str, dict[str, tuple[str, ...] | None]]
ABOUT = {name: words for group in GROUPS.values() for name, words in group.items()}
SAVE = """\
bash
  mkdir -p ~/.local/share/bash-completion/completions
  vitrail completion bash > ~/.local/share/bash-completion/completions/vitrail
zsh, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  mkdir -p ~/.zfunc
  vitrail completion zsh > ~/.zfunc/_vitrail
fish
  vitrail completion fish > ~/.config/fish/completions/vitrail.fish"""
HEAD = "# Tab completes vitrail's commands, options and files. `vitrail completion` tells where to"
HEAD += "\n# put this file; write it anew when vitrail is upgraded."


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script by which the Tab key completes commands and options, or where to put it."""

    shell: Annotated[tyro.conf.Positional[Shell | None], tyro.conf.arg(metavar="[SHELL]")] = None
    """bash, zsh or fish: whose script to print; without it, where each belongs."""

    def run(self) -> None:
        if self.shell is None:
            print(f"Type the lines for your shell, and begin a new one:\n\n{SAVE}")
        else:
            print({"bash": for_bash, "zsh": for_zsh, "fish": for_fish}[self.shell](all_words()))


def all_words() -> Words:
    """Of every command: what tyro takes, and names that we know."""
    from vitrail.cli import COMMANDS, with_switches

    words: Words = {
        name: {"--help": None, **dict(options(with_switches(command)))}
        for name, command in COMMANDS.items()
    }
    words["plan"][""] = tuple(CONFIGURATIONS)
    words["reproduce"][""] = (*NAMES, ALL)
    for known in words.values():
        if "--recipe" in known:
            known |= {"--recipe": tuple(recipe_names()), "--model.name": tuple(CONFIGURATIONS)}
    return words


def options(command: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Each option as tyro names it, with what it may be."""
    hints = get_type_hints(command, include_extras=True)
    for field in fields(command):
        hint = hints[field.name]
        kind, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        named = [mark.name for mark in marks if getattr(mark, "name", None) is not None]
        name = named[0] if named else field.name.replace("_", "-")
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from options(kind, f"{prefix}{name}." if name else prefix)
        elif tyro.conf.Positional in marks:
            yield "", tuple(choices(kind))
        elif kind is bool:
            yield f"--{prefix}{name}", None
            if tyro.conf.FlagCreatePairsOff not in marks:
                yield f"--{prefix}no-{name}", None
        else:
            yield f"--{prefix}{name}", tuple(choices(kind))


def choices(kind: Any) -> Iterator[str]:
    """The words of a Literal, also within a union or a tuple; not those of several words."""
    if get_origin(kind) is Literal:
        yield from (str(word) for word in get_args(kind) if " " not in str(word))
    elif get_origin(kind) in (Union, UnionType, tuple):
        for part in get_args(kind):
            yield from ("True", "False") if part is bool else choices(part)


def for_bash(words: Words) -> str:
    valued, dashed, plain = [], [], []
    for command, known in words.items():
        for option, values in known.items():
            if option and values:
                valued.append(f'        "{command} {option}") words="{" ".join(values)}" ;;')
        dashed.append(f'        "{command} "-*) words="{" ".join(filter(None, known))}" ;;')
        if values := known.get(""):
            plain.append(f'        "{command} "*) words="{" ".join(values)}" ;;')
    return f"""\
{HEAD}
_vitrail() {{
    local words= now=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}
    local command=${{COMP_WORDS[1]}}
    if ((COMP_CWORD == 1)); then
        words="{" ".join(words)}"
    elif [[ $now == -* ]]; then
        case "$command $now" in
{indented(dashed)}
        esac
    elif [[ $before == -* ]]; then
        case "$command $before" in
{indented(valued)}
        esac
    else
        case "$command $now" in
{indented(plain)}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$now"))
}}
complete -o default -F _vitrail vitrail  # files, where no word fits"""


def for_zsh(words: Words) -> str:
    valued, dashed, plain = [], [], []
    for command, known in words.items():
        for option, values in known.items():
            if option and values:
                valued.append(f'        ("{command} {option}") compadd {" ".join(values)} ;;')
        dashed.append(f"        ({command}) compadd -- {' '.join(filter(None, known))} ;;")
        if values := known.get(""):
            plain.append(f"        ({command}) compadd {' '.join(values)} ;;")
    about = "\n".join(f"        {quote(f'{name}:{ABOUT[name]}')}" for name in words)
    return f"""\
#compdef vitrail
{HEAD}
_vitrail() {{
    local command=$words[2] before=$words[CURRENT-1]
    local -a commands=(
{about}
    )
    if ((CURRENT == 2)); then
        _describe command commands
    elif [[ $PREFIX == -* ]]; then
        case $command in
{indented(dashed)}
        esac
    elif [[ $before == -* ]]; then
        case "$command $before" in
{indented(valued)}
            (*) _files ;;
        esac
    else
        case $command in
{indented(plain)}
        esac
        _files
    fi
}}
if [[ $funcstack[1] == _vitrail ]]; then _vitrail "$@"; else compdef _vitrail vitrail; fi"""


def for_fish(words: Words) -> str:
    lines = [HEAD]
    for command in words:
        about = quote(ABOUT[command])
        lines.append(f"complete -c vitrail -f -n __fish_use_subcommand -a {command} -d {about}")
    for command, known in words.items():
        given = f"complete -c vitrail -n '__fish_seen_subcommand_from {command}'"
        for option, values in known.items():
            what = f" -l {option.removeprefix('--')}" if option else ""
            if values:
                lines.append(f"{given}{what}{' -x' if what else ''} -a '{' '.join(values)}'")
            elif what:
                lines.append(f"{given}{what}{'' if values is None else ' -r'}")
    return "\n".join(lines)


def indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
