"""Tables of other trainers' keys, for the page `how-to/coming_from`. `omnizoo convert` uses the same tables."""

import re

from generators.markdown import code, table
from omnizoo.config import reference
from omnizoo.config.foreign.base import Rule, Status
from omnizoo.config.foreign.lookup import TRAINERS

# A key, maybe with a value of one word.
KEY = re.compile(rf"\b(?:{'|'.join(reference.sections())})(?:\.\w+)+(?:: \w+\b)?")
TITLES: dict[Status, tuple[str, str, str]] = {  # introduction and header of the table for each kind of key
    "copied": ("Keys that are converted:", "their key", "OmniZoo"),
    "by hand": ("Keys that you set by hand:", "their key", "OmniZoo"),
    "not needed": ("Keys that are not needed:", "their key", "reason"),
    "unsupported": ("Keys that are not supported yet:", "their key", "instead"),
}


def replacements() -> str:
    """Return a section with tables for each trainer."""
    parts = []
    for trainer in TRAINERS.values():
        parts.append(f"### {trainer.title}\n")
        for status, (introduction, *header) in TITLES.items():
            rows = [_row(rule) for rule in trainer.rules if rule.status == status]
            parts += [f"{introduction}\n", table(tuple(header), sorted(set(rows)))]
        rows = [(code(key), code(_plain(value))) for key, value in trainer.defaults.items()]
        parts += ["Defaults that differ, which the converted config contains:\n", table(("key", "default"), rows)]
    return "\n".join(parts)


def _row(rule: Rule) -> tuple[str, str]:
    """Return the row of a rule: their keys, and our key or the reason why there is none."""
    text = rule.replacement if rule.status in ("copied", "by hand") else rule.note
    return ", ".join(code(name) for name in sorted(rule.names)), _with_code(text)


def _plain(value: object) -> str:
    return str(value).strip("()")


def _with_code(replacement: str) -> str:
    """Mark the keys of a replacement as code: `train.lr (peak)` -> `` `train.lr` (peak) ``."""
    if re.fullmatch(r"[\w.]+: [\[{].*[\]}]", replacement):
        return code(replacement)
    parts = replacement.split("`")
    parts[::2] = [KEY.sub(r"`\g<0>`", part) for part in parts[::2]]  # odd parts are code already
    return "`".join(parts)
