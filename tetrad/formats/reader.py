"""Reads stored tensors straight to where they stay, several at a time.

Threads read pieces of files with `preadv`: into the tensor's own memory on a CPU, and through a
pinned buffer for each thread on a GPU, from where the device copies them. So memory holds a weight
once, besides these buffers, and no file is mapped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tetrad.core.errors import CheckpointError
from tetrad.formats.catalogue import StoredTensor

NUM_READERS = 8
"""Enough for a fast disk, and for a page cache that one core does not copy fast enough."""
PIECE_BYTES = 16 << 20
"""Of one read, and of a thread's pinned buffer."""
ALONE_BYTES = 1 << 20
"""Less than this is read without waking threads, and reaches a GPU in one copy."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""safetensors' names that torch has a type for."""

Target = tuple[StoredTensor, Tensor]
"""What is read, and the memory that it fills: contiguous, of its type and size."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a file, and the bytes that it fills."""

    file: Path
    handle: int
    offset: int
    target: Tensor
    """uint8 [n]"""
    stored: StoredTensor


def empty_for(stored: StoredTensor, device: str, number: int | None = None) -> Tensor:
    """Memory for a stored tensor, or for `number` of them along a new leading axis. Raises
    CheckpointError when its type is unknown or its size is not that of its shape."""
    dtype = DTYPES.get(stored.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{stored.file} holds '{stored.name}' as {stored.dtype}, which is not a type that "
            f"Tetrad reads; it reads {', '.join(DTYPES)}."
        )
    shape = stored.shape if number is None else (number, *stored.shape)
    found = torch.empty(shape, dtype=dtype, device=device)
    if found.nbytes != stored.nbytes * (1 if number is None else number):
        raise CheckpointError(
            f"{stored.file} is damaged: '{stored.name}' is {stored} in {stored.nbytes} bytes."
        )
    return found


class Reader:
    """Fills tensors of main memory or of a GPU."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._own = threading.local()

    def fill(
        self, targets: Sequence[Target], on_piece: Callable[[StoredTensor, int], None]
    ) -> None:
        """Read them all, which lie on one device; `on_piece` hears of each piece and its bytes, in
        this thread. Raises CheckpointError."""
        is_large = sum(stored.nbytes for stored, _ in targets) >= ALONE_BYTES
        ready = _recorded(targets[0][1].device)
        with _opened(stored.file for stored, _ in targets) as handles:
            pieces = list(_pieces(targets, handles))
            work = [(piece, ready) for piece in pieces]
            try:
                done = self._pool().map(self._read, work) if is_large else map(self._read, work)
                for piece, _ in zip(pieces, done, strict=True):
                    on_piece(piece.stored, len(piece.target))
            except BaseException:
                self.close()  # before the files are: other threads may still read
                raise

    def close(self) -> None:
        """End the threads and give their buffers back."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._threads, self._own = None, threading.local()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_READERS, "read weights")
        return self._threads

    def _read(self, work: tuple[_Piece, torch.cuda.Event | None]) -> None:
        piece, ready = work
        if ready is None:
            _read_into(piece, piece.target)
            return
        staging, stream = self._of_thread(piece.target.device)
        part = staging[: len(piece.target)]
        _read_into(piece, part)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            piece.target.copy_(part, non_blocking=True)
        stream.synchronize()

    def _of_thread(self, device: torch.device) -> tuple[Tensor, torch.cuda.Stream]:
        """The thread's pinned buffer, and its stream."""
        if not hasattr(self._own, "buffers"):
            staging = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._own.buffers = (staging, stream)
        found: tuple[Tensor, torch.cuda.Stream] = self._own.buffers
        return found


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """On a GPU the moment after what may still use the memory that targets got."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def _opened(files: Iterable[Path]) -> Iterator[dict[Path, int]]:
    handles: dict[Path, int] = {}
    try:
        for file in files:
            if file not in handles:
                try:
                    handles[file] = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{file} cannot be read: {error}.") from error
        yield handles
    finally:
        for handle in handles.values():
            os.close(handle)


def _pieces(targets: Iterable[Target], handles: dict[Path, int]) -> Iterator[_Piece]:
    for stored, tensor in targets:
        flat = tensor.view(-1).view(torch.uint8)
        for start in range(0, stored.nbytes, PIECE_BYTES):
            part = flat[start : start + PIECE_BYTES]
            yield _Piece(stored.file, handles[stored.file], stored.offset + start, part, stored)


def _read_into(piece: _Piece, memory: Tensor) -> None:
    """Fill bytes of main memory."""
    view = memory.numpy().data
    position = 0
    while position < len(view):
        try:
            count = os.preadv(piece.handle, [view[position:]], piece.offset + position)
        except OSError as error:
            raise CheckpointError(f"{piece.file} cannot be read: {error}.") from error
        if count == 0:
            raise CheckpointError(f"{piece.file} cannot be read: it became shorter.")
        position += count
