"""`vitrail completion`: shell completion of commands, options and files, written by tyro."""

from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from typing import Annotated, Any, Literal, Union

import tyro

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
fi""",
    "fish": "complete --command vitrail --condition '__fish_seen_subcommand_from {commands}' -F",
}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a shell completion script, or how to install one."""

    shell: Annotated[tyro.conf.Positional[Shell | None], tyro.conf.arg(metavar="[SHELL]")] = None
    """bash, zsh or fish. Without it, the commands that install each script are printed."""

    def run(self) -> None:
        print(INSTALL if self.shell is None else script(self.shell))


def script(shell: Shell) -> str:
    """Return the completion script of all commands."""
    from vitrail.cli import COMMANDS, with_switches

    commands: Any = Union[
        *(Annotated[with_switches(c), tyro.conf.subcommand(name)] for name, c in COMMANDS.items())
    ]
    text = StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(commands, prog="vitrail", args=["--tyro-write-completion", shell, "-"])
    tyros = text.getvalue().rstrip().removesuffix('_tyro_vitrail "$@"')  # the last line for zsh
    return tyros + "\n" + FILES[shell].replace("{commands}", " ".join(COMMANDS))
