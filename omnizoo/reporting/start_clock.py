"""Measure the time from the command to the end of the first step, by phase.

The stopwatch starts before torch is imported, so this module must import quickly.
"""

import os
import time

import psutil

LAUNCHED_AT = "OMNIZOO_LAUNCHED_AT"  # start time of the launcher, in seconds since the epoch


class StartClock:
    """Stopwatch for start-up phases. Call `done` at the end of each phase."""

    def __init__(self, whole_process: bool = False) -> None:
        """Start the stopwatch.

        Args:
            whole_process: Also count the time before this call, since the start of the launcher or of this process.
        """
        self.parts: dict[str, float] = {}
        self._at = time.time()
        if whole_process:
            process_start = psutil.Process().create_time()
            launcher_start = float(os.environ.get(LAUNCHED_AT, process_start))
            if launcher_start < process_start:
                self.parts["launcher"] = process_start - launcher_start
            self._at = process_start
            self.done("interpreter")

    def done(self, part: str) -> None:
        """Add the time since the last call, or since the start, to the duration of the phase `part`."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + max(0.0, now - self._at)
        self._at = now

    @property
    def line(self) -> str:
        """One line with the total time and the time of each phase."""
        phases = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.parts.items())
        return f"start: {sum(self.parts.values()):.2f} s to the end of the first step: {phases}"
