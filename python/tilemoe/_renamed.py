"""Older public names: each works for one version, with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def warn(old: str, new: str, stacklevel: int) -> None:
    """Warns that `old` is the older name of `new`. stacklevel: 1 is the caller of this function."""
    text = f"tilemoe: {old} is the older name of {new} and will be removed in the next version"
    warnings.warn(text, DeprecationWarning, stacklevel + 1)


def option(**names: str) -> Callable[[_Function], _Function]:
    """Make a function accept a keyword's older name: `option(old="new")`.

    Raises, when the decorated function is called:
        TypeError: the call has both keywords.
    """

    ((old, new),) = names.items()

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if old in options:
                if new in options:
                    raise TypeError(f"tilemoe: {new} and {old}, its older name, are both given")
                warn(f"{old}=", f"{new}=", 2)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate
