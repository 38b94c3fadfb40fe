"""How long a run takes from the command to the end of its first step, by part. Imports nothing heavy."""

import os
import time

import psutil

LAUNCHED_AT = "OMNIZOO_LAUNCHED_AT"  # when the launcher was started, in seconds since the epoch


class StartClock:
    """`done(part)`: what has happened since the last call was that part. A part may have several stretches."""

    def __init__(self, whole_process: bool = False) -> None:
        """`whole_process`: from its start on, and that of the launcher before it; else from now on."""
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
