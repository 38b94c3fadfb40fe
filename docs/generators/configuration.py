"""Configuration reference from the schema: one page per section, with an anchor for each key."""

import math
import re
from collections.abc import Iterable

from generators.markdown import code, directive, sentence, table
from omnizoo.config import reference
from omnizoo.config.reference import Key


def pages() -> dict[str, str]:
    """Return the text of the page of each section, by name."""
    return {name: _section_page(name, about) for name, about in reference.sections().items()}


def section_list() -> str:
    """Return a table of the sections and the toctree of their pages, for the page `reference/configuration`."""
    sections = reference.sections()
    links = ((f"[`{name}`](configuration/{name}.md)", sentence(about)) for name, about in sections.items())
    toctree = directive("toctree", "", {"hidden": ""}, "\n".join(f"configuration/{name}" for name in sections))
    return table(("section", "content"), links) + "\n" + toctree


def _section_page(section: str, about: str) -> str:
    keys = [key for key in reference.all_keys() if key.key.startswith(f"{section}.")]
    parts = [f"# {section}\n", sentence(about) + "\n"]
    for prefix, group in _by_parent(keys).items():
        if prefix != section:
            parts.append(f"## {prefix}\n")
        parts += [_key_entry(key) for key in group]
    return "\n".join(parts)


def _by_parent(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Group keys by the mapping that contains them: `data.sources.N.path` belongs to `data.sources.N`."""
    groups: dict[str, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.key.rpartition(".")[0], []).append(key)
    return groups


def _key_entry(key: Key) -> str:
    default = key.default if key.default == "required" else code(key.default)
    options = {"type": _with_powers(key.type), "default": default}
    return directive("confval", key.key, options, _with_links(sentence(key.description)))


def _with_powers(type_text: str) -> str:
    """Write large bounds as powers: `<= 1000000000000` -> `<= 10^12`."""

    def power(number: re.Match[str]) -> str:
        value = int(number[0])
        for base in (10, 2):
            exponent = round(math.log(value, base))
            if base**exponent == value:
                return f"{base}^{exponent}"
        return number[0]

    return re.sub(r"\d{5,}", power, type_text)


def _with_links(description: str) -> str:
    """Turn names of pages (`docs/how-to/data.md`) into links."""
    return re.sub(r"docs/((?:[\w-]+/)+[\w-]+\.md)", r"[\1](../../\1)", description)
