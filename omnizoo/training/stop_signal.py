"""Turn SIGTERM and SIGINT into a request to stop after the current step."""

import signal
from types import FrameType


class StopSignal:
    """Truthy after the first SIGTERM or SIGINT. A later SIGINT raises `KeyboardInterrupt` immediately."""

    def __init__(self) -> None:
        self.signal: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal is not None
