"""Turn SIGTERM and SIGINT into a request to stop after the current step."""

import signal
from types import FrameType
from typing import Any


class StopSignal:
    """Truthy after the first SIGTERM or SIGINT. A later SIGINT raises `KeyboardInterrupt` immediately.

    As a context manager, it restores the earlier handlers at the end, so that a notebook can be interrupted later.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._earlier: dict[int, Any] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            self._earlier[number] = signal.signal(number, self._handle)

    def __enter__(self) -> "StopSignal":
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal is not None
