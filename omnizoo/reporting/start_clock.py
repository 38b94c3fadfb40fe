"""Time from the command to the end of the first step, by phase.

This module imports nothing slow.
"""

import os
import time

import psutil

LAUNCHED_AT = "OMNIZOO_LAUNCHED_AT"  # start time of the launcher, in seconds since the epoch


class StartClock:
    """Stopwatch for start-up phases. `done(part)` adds the time since the last call to a phase."""

    def __init__(self, whole_process: bool = False) -> None:
        """Start the stopwatch.

        Args:
            whole_process: Also count the time since this process, and the launcher before it, was started.
        """
        self.parts: dict[str, float] = {}
        self._at = time.time()
        if whole_process:
            begun = psutil.Process().create_time()
            launched = float(os.environ.get(LAUNCHED_AT, begun))
            if launched < begun:
                self.parts["launcher"] = begun - launched
            self._at = begun
            self.done("interpreter")

    def done(self, part: str) -> None:
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + max(0.0, now - self._at)
        self._at = now

    @property
    def line(self) -> str:
        each = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.parts.items())
        return f"start: {sum(self.parts.values()):.2f} s to the end of the first step: {each}"
