"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`. It goes through pinned memory: from other memory the
    driver may first wait for all that runs."""
    return _pinned_for(device, values).to(device, non_blocking=True)


def send_into(values: Tensor, target: Tensor) -> None:
    """Copy a CPU tensor into one on a device, as `to_device` does."""
    target.copy_(_pinned_for(target.device, values), non_blocking=True)


def _pinned_for(device: torch.device, values: Tensor) -> Tensor:
    return values.pin_memory() if device.type == "cuda" and values.numel() else values


class Fetch:
    """Tensors on their way to the host, as they are when all that was launched so far has run."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._arrival: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._arrival = torch.cuda.current_stream().record_event()

    def wait(self) -> tuple[Tensor, ...]:
        """The copies, in order. Blocks until they are there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copies
