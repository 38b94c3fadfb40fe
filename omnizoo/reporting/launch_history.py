"""The launches of a run: `starts.jsonl` contains the command, versions and git state of each launch."""

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnizoo.config.versions import installed_versions
from omnizoo.reporting.run_folder import read_rows, replace_file

PACKAGES = ("omnizoo", "torch", "transformers", "peft", "datasets")


def add_start(file: Path, step: int, facts: Mapping[str, str], steps: int | None = None) -> None:
    """Append a record of this launch to the history of a run.

    Records of launches that began after `step` are removed. If `step` is 0 (a new run), all earlier records are
    removed.

    Args:
        file: `starts.jsonl` of the run.
        step: The last step in the loaded checkpoint; 0 for a new run.
        facts: Additional values to record as text, by name.
        steps: Number of steps of the whole run, if known.
    """
    start = {
        "step": step,
        "steps": steps,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command(),
        "versions": {"python": platform.python_version()} | installed_versions(PACKAGES),
        "git": git_state(Path.cwd()),
        "facts": dict(facts),
    }
    earlier_starts = [earlier for earlier in read_starts(file) if step and earlier["step"] <= step]
    _write(file, [*earlier_starts, start])


def add_seconds(file: Path, parts: Mapping[str, float]) -> None:
    """Add the duration of each start-up phase, up to the end of the first step, to the record of this launch."""
    *earlier_starts, last = read_starts(file)
    last["seconds"] = {part: round(seconds, 3) for part, seconds in parts.items()}
    _write(file, [*earlier_starts, last])


def _write(file: Path, starts: list[dict[str, Any]]) -> None:
    """Write all records to the file."""
    replace_file(file, "".join(json.dumps(start) + "\n" for start in starts))


def read_starts(file: Path) -> list[dict[str, Any]]:
    """Return the records of all launches of a run. Damaged lines are skipped."""
    return [start for start in read_rows(file) if isinstance(start.get("step"), int)]


def command() -> str:
    """Return the command line of this process in a form that a user can run again.

    The launcher removes `--nproc` from the command line of the ranks. The `facts` of a record contain the number of
    ranks.
    """
    program = Path(sys.argv[0])
    is_omnizoo = program.name == "omnizoo" or program.parts[-2:] == ("omnizoo", "__main__.py")
    return shlex.join(["omnizoo" if is_omnizoo else sys.argv[0], *sys.argv[1:]])


def git_state(folder: Path) -> str | None:
    """Return the commit and whether files in the working directory have changed.

    None if `folder` is not in a git repository with a commit, or if git is not installed or does not finish in time.
    """

    def git(*args: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=3, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed is None:
        return commit
    return f"{commit}, {len(changed.splitlines())} file(s) changed" if changed else f"{commit}, clean"
