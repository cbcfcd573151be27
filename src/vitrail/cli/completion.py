"""`vitrail completion`: shell completion of commands, options and files, written by tyro."""

from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from typing import Annotated, Any, Literal, Union

import tyro

from vitrail.cli.options import Command, HelpRegistry

Shell = Literal["bash", "zsh", "fish"]
INSTALL = """\
Run the lines for your shell, then start a new shell.

bash
  mkdir -p ~/.local/share/bash-completion/completions
  vitrail completion bash > ~/.local/share/bash-completion/completions/vitrail
zsh, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc
  mkdir -p ~/.zfunc
  vitrail completion zsh > ~/.zfunc/_vitrail
fish
  mkdir -p ~/.config/fish/completions
  vitrail completion fish > ~/.config/fish/completions/vitrail.fish"""
# tyro offers options where an argument such as DATA is expected; these lines offer files.
FILES = {
    "bash": """\
_vitrail() {
  if ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[COMP_CWORD]} != -* ]] \\
    && [[ ${COMP_WORDS[COMP_CWORD - 1]} != -* ]]; then COMPREPLY=(); else _tyro_vitrail; fi
}
complete -o default -F _vitrail vitrail""",
    "zsh": """\
if (( CURRENT > 2 )) && [[ $PREFIX != -* && $words[CURRENT-1] != -* ]]; then
  _files
else
  _tyro_vitrail "$@"
  (( compstate[nmatches] )) || _files
fi""",
    "fish": "complete --command vitrail --condition '__fish_seen_subcommand_from {commands}' -F",
}


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print a shell completion script, or how to install one."""

    shell: Annotated[tyro.conf.Positional[Shell | None], tyro.conf.arg(metavar="[SHELL]")] = None
    """bash, zsh or fish; omit it to print installation instructions."""

    def run(self) -> None:
        if self.shell is None:
            print(INSTALL)
            return
        from vitrail.cli import COMMANDS, GROUPS

        commands: Any = Union[*(Annotated[c, tyro.conf.subcommand(n)] for n, c in COMMANDS.items())]
        output, argv = StringIO(), ["--tyro-write-completion", self.shell, "-"]
        with redirect_stdout(output), suppress(SystemExit):
            tyro.cli(commands, prog="vitrail", args=argv, registry=HelpRegistry())
        # zsh: files are completed below, and words count from 1, while tyro counts from 0.
        text = output.getvalue().rstrip().removesuffix('_tyro_vitrail "$@"')
        text = text.replace('"${words[@]}" "$CURRENT"', '"${words[@]}" "$((CURRENT - 1))"')
        for group in GROUPS.values():  # tyro describes a command by its name
            for name, (_, summary) in group.items():
                entry = f"{name!r}: {{'description': "
                text = text.replace(f"{entry}{name!r}", f"{entry}'{summary}'")  # no quotes in it
        print(text, FILES[self.shell].replace("{commands}", " ".join(COMMANDS)), sep="\n")
