"""Which packages vitrail asks for, always or for an extra, and which of them are there."""

import re
from dataclasses import dataclass
from importlib import metadata

REQUIREMENT = re.compile(r"([\w.-]+?)(?:\[.*\])?(?:>=([\d.]+))?(?:;(?:.*extra == '([\w-]+)')?.*)?")


@dataclass(frozen=True)
class Package:
    """A package that is needed, always or for an extra."""

    name: str
    least: str  # the oldest version that will do; empty if any does
    version: str | None  # None: it is not installed

    @property
    def fits(self) -> bool:
        return self.version is not None and numbers(self.version) >= numbers(self.least)


def requirements() -> dict[str, tuple[Package, ...]]:
    """What the installed vitrail asks for, under "" or the name of the extra."""
    found: dict[str, tuple[Package, ...]] = {}
    try:
        lines = metadata.requires("vitrail") or []
    except metadata.PackageNotFoundError:  # run from its source, without an installation
        lines = []
    for line in lines:
        match = REQUIREMENT.fullmatch(line)
        assert match is not None, line
        name, least, extra = match.groups(default="")
        found[extra] = (*found.get(extra, ()), Package(name, least, installed(name)))
    return found


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu → (2, 13, 0), which compares as versions do."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
