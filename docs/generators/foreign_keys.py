"""Table of other trainers' keys and their replacements, for the page `how-to/coming_from`."""

import re

from generators.markdown import code, table
from omnizoo.config import reference
from omnizoo.config.foreign_keys import NO_KEY, NOT_YET, REPLACEMENTS

# A key, maybe with a value of one word.
KEY = re.compile(rf"\b(?:{'|'.join(reference.sections())})(?:\.\w+)+(?:: \w+\b)?")


def replacements() -> str:
    """Return three tables: keys with a replacement, keys that are not needed, keys that are not supported."""
    renamed: list[tuple[str, str]] = []
    unnecessary: list[tuple[str, str]] = []
    unsupported: list[tuple[str, str]] = []
    for replacement, names in REPLACEMENTS.items():
        listed = ", ".join(code(name) for name in sorted(names.split()))
        if replacement.startswith(NO_KEY):
            unnecessary.append((listed, _with_code(_reason(replacement, NO_KEY))))
        elif replacement.startswith(NOT_YET):
            unsupported.append((listed, _with_code(_reason(replacement, NOT_YET))))
        else:
            renamed.append((listed, _with_code(replacement)))
    return "\n".join(
        [
            table(("their key", "OmniZoo"), renamed),
            "These keys have no counterpart, because none is needed:\n",
            table(("their key", "reason"), unnecessary),
            "These keys are not supported yet:\n",
            table(("their key", "instead"), unsupported),
        ]
    )


def _reason(replacement: str, start: str) -> str:
    return replacement.removeprefix(start).removeprefix(": ")


def _with_code(replacement: str) -> str:
    """Mark the keys of a replacement as code: `train.lr (peak)` -> `` `train.lr` (peak) ``."""
    if re.fullmatch(r"[\w.]+: [\[{].*[\]}]", replacement):
        return code(replacement)
    parts = replacement.split("`")
    parts[::2] = [KEY.sub(r"`\g<0>`", part) for part in parts[::2]]  # odd parts are code already
    return "`".join(parts)
