"""Hints about Hugging Face Hub names in keys that expect a folder.

Nothing is downloaded; the hint contains the command to do so.
"""

import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_hint(name: str, kind: str) -> str:
    """Return a hint for a `name` that may be on the Hugging Face Hub; empty if it looks like a path."""
    if not HUB_NAME.fullmatch(name) or Path(name.partition("/")[0]).exists():
        return ""
    if kind == "dataset":
        steps = f"run `hf download {name} --repo-type dataset --local-dir DIR` and set path: DIR, or set "
        steps += f"path: hf://datasets/{name}"
    else:
        steps = f"run `hf download {name} --local-dir DIR` and use DIR"
    return f"; for a {kind} on the Hugging Face Hub, {steps}"
