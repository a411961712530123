"""Read the dtype of torch.autocast for the device of a tensor."""

import torch

# One call of C++ if autocast is off on all devices. torch might not have the function.
_is_any_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on this device; None if it is off, and for meta."""
    if not torch.compiler.is_compiling() and not _is_any_enabled():
        return None
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
