"""Whether torch.autocast is on, by the device of a tensor."""

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on this device; None where it is off, and on meta, which has none."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
