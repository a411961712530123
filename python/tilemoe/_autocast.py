"""Read the dtype of torch.autocast for the device of a tensor."""

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts to on this device; None if it is off, and for meta."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
