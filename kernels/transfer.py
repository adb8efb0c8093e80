"""The way of the host's arrays to the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on the device, without waiting for the device's earlier work."""
    tensor = torch.from_numpy(array)
    # torch keeps pinned memory until the copies out of it have ended.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
