"""Read the options of functions from keywords, and show them in help()."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from . import _renamed
from .options import DEFAULTS, FIELDS, OLDER, TYPES, Options

_Function = TypeVar("_Function", bound=Callable[..., Any])

MAX_KEPT = 4096  # Options that a reader keeps


def is_compiling() -> bool:
    """Return whether torch.compile is tracing; _library.py puts torch's function here."""
    return False


class Reader:
    """Make the Options of one function from the keywords of its calls.

    A reader keeps one Options per set of values. A program has few sets, so a call costs one
    look-up. Values of different types are different, so that True is not read as 1.
    """

    def __init__(self, function: str, kind: type, *own: str) -> None:
        """Read the keywords of `kind`.

        Args:
            function: Name of the function.
            kind: TypedDict of its options.
            own: Options that are ordinary arguments of the function.
        """
        self.function, self.own = function, own
        wanted = {*get_type_hints(kind), *own}
        self.names = tuple(name for name in FIELDS if name in wanted)
        self._kept: dict[Any, Options] = {}

    def __call__(self, given: dict[str, Any]) -> Options:
        if is_compiling():
            return self._make(given)
        key = (*given.items(), *map(type, given.values()))
        try:
            return self._kept[key]
        except KeyError:
            pass
        except TypeError:  # a value without a hash
            return self._make(given)
        made = self._make(given)
        if not OLDER.keys() & given.keys():  # the warning belongs to every call
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = made
        return made

    def _make(self, given: dict[str, Any]) -> Options:
        for name in given:
            if name not in self.names:
                given = self._renamed(given, name)
        return Options(**given)

    def _renamed(self, given: dict[str, Any], name: str) -> dict[str, Any]:
        """Return `given` with the newer name of an option that is given by its older one."""
        newer = OLDER.get(name)
        if newer not in self.names:
            near = [] if is_compiling() else difflib.get_close_matches(name, self.names, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{self.function}() got an unexpected keyword argument {name!r}{hint}")
        if newer in given:
            raise TypeError(
                f"{newer}= and {name}=, its older name, are both given; pass only {newer}="
            )
        _renamed.warn(f"{name}=", f"{newer}=", 5)  # points to the call of the function
        return {newer if key == name else key: value for key, value in given.items()}

    def shows(self, function: _Function) -> _Function:
        """Complete the signature and the docstring of a function or class with `**options`.

        Both get the options with their defaults.
        """
        call: Any = function.__init__ if isinstance(function, type) else function  # type: ignore
        signature = inspect.signature(call)
        shown = tuple(name for name in self.names if name not in self.own)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        mine = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=TYPES[name]
            )
            for name in shown
        ]
        call.__signature__ = signature.replace(parameters=[*own, *mine])
        if function.__doc__ is not None:  # python -OO has none
            function.__doc__ = with_options(function.__doc__, shown)
        return function

    def part_of(self, options: Options) -> dict[str, Any]:
        """Return the function's own options as keywords."""
        return {name: getattr(options, name) for name in self.names}

    def attributes(self, kind: _Function) -> _Function:
        """Give a class that has `options` one attribute per option.

        Setting an attribute makes new Options, which checks the value.
        """
        for name in self.names:
            setattr(kind, name, _attribute(name))
        return kind


def _attribute(name: str) -> property:
    def value(self: Any) -> Any:
        return getattr(self.options, name)

    def set_value(self: Any, value: Any) -> None:
        self.options = dataclasses.replace(self.options, **{name: value})

    return property(value, set_value, doc=FIELDS[name].metadata["doc"])


def with_options(doc: str, names: tuple[str, ...]) -> str:
    """Return a docstring with the options at the end of its Args."""
    doc = inspect.cleandoc(doc)
    before, heading, after = re.split(r"(\n\n(?:Returns|Raises):\n)", doc, maxsplit=1)
    lines = [
        textwrap.fill(
            f"{name}: {FIELDS[name].metadata['doc']}", 96, initial_indent=" " * 4,
            subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False,
        )
        for name in names
    ]  # fmt: skip
    return "\n".join([before, *lines]) + heading + after
