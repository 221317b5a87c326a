"""What cannot be wrapped is refused, in words."""

from __future__ import annotations

from typing import Any

from dgc_horovod.errors import UnsupportedUse

_LIBRARIES = ("keras", "tensorflow")
_HARMLESS = ("get_config",)  # it tells of what was wrapped, and changes nothing


def refuse_own_methods(given: Any, factory: str) -> None:
    """Raise UnsupportedUse for an object with a method that a script has put on it in place of its class's.

    Such a function goes on calling `given`, or stands in the way of ours: what is wrapped would exchange nothing, or
    step in another way than the exchange is made for. Other functions on it, which no library calls, stay.

    Args:
        given: optimizer or tape that is to be wrapped.
        factory: name of the function that wraps it.
    """
    bases = [base for base in type(given).__mro__ if base.__module__.split(".")[0] in _LIBRARIES]
    held = [name for name, value in vars(given).items() if callable(value) and name not in _HARMLESS]
    own = [name for name in held if any(callable(getattr(base, name, None)) for base in bases)]
    if own:
        raise UnsupportedUse(
            f"the {type(given).__name__} that is to be wrapped has {' and '.join(own)} of its own, put on the object: "
            f"it would go on calling the object from before {factory}, and gradients would not be exchanged as they "
            f"should. Put it on what {factory} returns, around the method there; or define it in a class"
        )
