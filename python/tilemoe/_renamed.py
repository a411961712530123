"""Support older public names for one version, with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def warn(old: str, new: str, stacklevel: int) -> None:
    """Warn that `old` is the older name of `new`.

    Args:
        old: Older name.
        new: Newer name.
        stacklevel: Frame of the warning; 1 is the caller of this function.
    """
    text = f"{old} is the older name of {new} and will be removed in the next version"
    warnings.warn(text, DeprecationWarning, stacklevel + 1)


def option(**names: str) -> Callable[[_Function], _Function]:
    """Make a function accept the older name of a keyword: `option(old="new")`.

    Args:
        **names: Older names with their newer names.

    Raises:
        TypeError: A call of the decorated function has both keywords.
    """

    ((old, new),) = names.items()

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if old in options:
                if new in options:
                    raise TypeError(
                        f"{new} and {old} are both given, expected only {new}; {old} is its "
                        "older name"
                    )
                warn(f"{old}=", f"{new}=", 2)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate
