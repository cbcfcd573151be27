"""Read a pickle without executing it: its calls are stored, and its objects are counted.

A pickle may contain an object any number of times. So a few bytes can describe a key whose hash
takes years, or a thousand calls with the same long list.
"""

import pickle
from collections.abc import Iterable
from typing import Any, BinaryIO

from vitrail.errors import DataError

MAX_REPETITION = 20  # objects in tuples, keys and arguments for each byte of the file
MIN_OBJECTS = 2**20  # that are always allowed
DISPATCH: Any = pickle._Unpickler.dispatch
TUPLES = {op[0] for op in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)}
CONTAINERS = {op[0] for op in (pickle.SETITEM, pickle.SETITEMS, pickle.DICT)}
CONTAINERS |= {pickle.FROZENSET[0], pickle.ADDITEMS[0]}


class PickledCall:
    """Call in a pickle, and the state of its result: stored, not executed and not yet trusted."""

    args: tuple[Any, ...] = ()
    state: Any = ()
    size = 0  # of its arguments, where they are counted

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the items of a dictionary that a call makes."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Unpickler(pickle._Unpickler):  # the Python version: the C one trusts sizes in the file
    """Stores calls; rejects repetition, and BUILD on anything but calls, since setting the state of
    a class would change it for the whole process."""

    stack: Any

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")
        self.tell, self.total = file.tell, 0
        self.tuples: dict[int, tuple[Any, int]] = {}  # by id: the tuple, and its size

    def find_class(self, module: str, name: str) -> Any:
        return PickledCall

    def count(self, values: Iterable[Any], depth: int = 2) -> int:
        """Add the size of values to the total, and return it."""
        before = self.total
        for value in values:
            if isinstance(value, list) and depth:
                self.count(value, depth - 1)
            elif isinstance(value, tuple):
                self.total += self.tuples.get(id(value), (value, 0))[1]
            elif isinstance(value, PickledCall):
                self.total += value.size
            elif isinstance(value, str | bytes | list | dict):
                self.total += len(value)
            self.total += 1
            if self.total > MAX_REPETITION * self.tell() + MIN_OBJECTS:
                raise DataError("it contains the same objects too many times")
        return self.total - before

    def load_build(self) -> None:
        target = self.stack[-2]
        if not isinstance(target, PickledCall):
            raise DataError(f"it sets the state of a {type(target).__name__}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    def load_counted(self, opcode: int) -> None:
        if opcode in CONTAINERS:
            self.count(self.stack[-2:] if opcode == pickle.SETITEM[0] else self.stack)
        DISPATCH[opcode](self)
        if opcode in TUPLES:
            value = self.stack[-1]
            self.tuples[id(value)] = value, self.count(value)

    dispatch: Any = (
        DISPATCH
        | {pickle.BUILD[0]: load_build}
        | {op: lambda self, op=op: self.load_counted(op) for op in TUPLES | CONTAINERS}
    )
