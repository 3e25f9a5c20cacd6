"""Copies from a GPU while the GPU and the host go on. Runs on every rank."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DeviceCopy:
    """A copy from a GPU in a CUDA stream. Measures how long the GPU's other work waits for the copy."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        import torch

        # A thread that waits for an event usually keeps a core of the training busy.
        self._copied: Any = stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        self._waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def make_device_wait(self) -> None:
        """Make the GPU's next work wait until the copy is complete. The host does not wait."""
        import torch

        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        began.record(current)
        current.wait_event(self._copied)
        ended.record(current)
        self._waited = began, ended

    def wait(self) -> None:
        """Make the host wait for the copy. Any thread may call this."""
        self._copied.synchronize()

    @property
    def stall_seconds(self) -> float:
        """Seconds that the GPU waited for the copy; 0 until it continues."""
        if self._waited is None:
            return 0.0
        began, ended = self._waited
        milliseconds: float = began.elapsed_time(ended) if ended.query() else 0.0  # type: ignore[no-untyped-call]
        return milliseconds / 1000
