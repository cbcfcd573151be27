"""What a command tells the shell when it ends; docs/commands.md has the table."""

from vitrail.errors import DataError

UNMET = 1  # it was done, and what was asked for is not so
REFUSED = 2  # it was not done: one line on standard error says why, and what would work
STOPPED = 130  # somebody asked it to end: Ctrl-C, or SIGTERM while training


class UnmetError(DataError):
    """It was done, and what was asked for is not so: one line, like other errors, and status 1."""
