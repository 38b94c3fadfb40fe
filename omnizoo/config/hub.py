"""Names of the Hugging Face hub, where a folder was expected: nothing is downloaded, but how to is said."""

import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_hint(name: str, kind: str) -> str:
    """What to do about something that may be a name of the Hugging Face hub; "" if it looks like a path."""
    if not HUB_NAME.fullmatch(name) or Path(name.partition("/")[0]).exists():
        return ""
    if kind == "dataset":
        way = f"`hf download {name} --repo-type dataset --local-dir DIR` and path: DIR, or path: hf://datasets/{name}"
    else:
        way = f"`hf download {name} --local-dir DIR`, and give DIR"
    return f"; if it is a {kind} of the Hugging Face hub: {way}"
