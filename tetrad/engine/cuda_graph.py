"""CUDA graph capture on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tetrad.engine.graphs import CannotRecordError
from tetrad.kernels.device import waiting_is_an_error


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """A tensor's memory without a hold on it, in the form `torch.as_tensor` takes."""

    __cuda_array_interface__: dict[str, Any]


class CudaRecorder:
    """Records into one memory pool: graphs run one after another, so what one leaves is free for
    the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See `Recorder`. A trial run compiles kernels and shows whether a step waits for the
        device, which a graph cannot."""
        stream = torch.cuda.current_stream(self._device)
        try:
            self._try(step)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first_line = str(error).splitlines()[0]
            raise CannotRecordError(f"the step cannot be recorded ({first_line}).") from error
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
        return graph.replay, self._borrow(result)

    def free_bytes(self) -> int:
        """Memory outside this process's pools."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def _try(self, step: Callable[[], Tensor]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
            with waiting_is_an_error():
                step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _borrow(self, result: Tensor) -> Tensor:
        """The result's memory, given back to the pool: the next graph may use it too, as whoever
        reads a result does so before another graph runs."""
        assert result.dtype == torch.float32
        assert result.is_contiguous()
        interface = {
            "shape": tuple(result.shape),
            "typestr": "<f4",
            "data": (result.data_ptr(), False),
            "version": 2,
        }
        return torch.as_tensor(_Borrowed(interface), device=self._device)
