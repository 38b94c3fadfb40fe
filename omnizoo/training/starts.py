"""Where a run comes from: each time it is started, its command, versions and state of the code go to `starts.jsonl`."""

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omnizoo.training.metrics import replace_file

PACKAGES = ("omnizoo", "torch", "transformers", "peft", "datasets")


def add_start(file: Path, step: int, facts: Mapping[str, str], steps: int | None = None) -> None:
    """Add this start, after step `step` of `steps`, to those of the same run; a run from the beginning has none before
    it."""
    start = {
        "step": step,
        "steps": steps,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command(),
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "facts": dict(facts),
    }
    before = [known for known in read_starts(file) if step and known["step"] <= step]
    replace_file(file, "".join(json.dumps(each) + "\n" for each in [*before, start]))


def add_seconds(file: Path, parts: Mapping[str, float]) -> None:
    """Add to the last start how long each of its parts took, until the end of the first step."""
    *before, last = read_starts(file)
    last["seconds"] = {part: round(seconds, 3) for part, seconds in parts.items()}
    replace_file(file, "".join(json.dumps(each) + "\n" for each in [*before, last]))


def read_starts(file: Path) -> list[dict[str, Any]]:
    """What is known; a line that is damaged is left out, since it only tells of the past."""
    starts = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            start = json.loads(line)
        except ValueError:
            continue
        if isinstance(start, dict) and isinstance(start.get("step"), int):
            starts.append(start)
    return starts


def command() -> str:
    """As it can be given again; of ranks that `--nproc` has started, without it: the mesh says how many they are."""
    name = Path(sys.argv[0])
    is_own = name.name == "omnizoo" or name.parts[-2:] == ("omnizoo", "__main__.py")
    return shlex.join(["omnizoo" if is_own else sys.argv[0], *sys.argv[1:]])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> str | None:
    """Commit of the working directory, and whether it has changes; None where there is no git, or it takes long."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=3, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not (commit := git("rev-parse", "--short=12", "HEAD")):
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed is None:
        return commit
    return f"{commit}, {len(changed.splitlines())} file(s) changed" if changed else f"{commit}, clean"
