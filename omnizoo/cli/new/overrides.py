"""Write overrides (`--section.key value`) into the text of a config, and keep its comments."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from omnizoo.config import reference
from omnizoo.config.overrides import apply_override


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def source_text(source: Mapping[str, Any], anchor: str = "", alias: str = "") -> str:
    """Return the settings of a source as YAML on one line, with its path in quotes.

    Args:
        source: The settings.
        anchor: Key whose value gets a YAML anchor; "" for no anchor.
        alias: Key whose value is replaced with a YAML alias of the anchor; "" for no alias.
    """
    items = []
    for name, value in source.items():
        is_quoted = name in ("path", "media_dir")
        text = json.dumps(value, ensure_ascii=False) if is_quoted else flow(value)
        if name == anchor:
            text = f"&{name} {text}"
        elif name == alias:
            text = f"*{name}"
        items.append(f"{name}: {text}")
    return "{" + ", ".join(items) + "}"


def write_overrides(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text of a config with changed values.

    Args:
        text: The config. Its sections are mappings, indented by two spaces.
        changes: New values by dotted key.
    """
    config = yaml.safe_load(text)
    for key, value in changes.items():
        apply_override(config, key, value)
    for key in _replaced(changes):
        text = _without_key(text, key)
    for key in dict.fromkeys(".".join(key.split(".")[:2]) for key in changes):
        section, _, name = key.partition(".")
        text = _with_key(text, key, config[section][name])
    return text


def _replaced(changes: Mapping[str, Any]) -> list[str]:
    """Return the keys to delete, because the config must not set them together with a changed key."""
    replaced = []
    for key in changes:
        section, _, name = key.partition(".")
        others = reference.exclusive_keys().get(section, {}).get(name.partition(".")[0], ())
        replaced += [f"{section}.{other}" for other in others if f"{section}.{other}" not in changes]
    return replaced


def _key_pattern(key: str) -> tuple[str, re.Pattern[str]]:
    """Return the header line of a key's section, and a pattern that matches the lines that set the key."""
    section, _, name = key.partition(".")
    return f"{section}:\n", re.compile(rf"^  {re.escape(name)}:.*\n(?:    .*\n)*", re.MULTILINE)


def _split_section(text: str, header: str) -> tuple[str, str, str]:
    """Return the text up to the header of a section, the lines of the section, and the text after it."""
    start = re.search(rf"^{re.escape(header)}", text, re.MULTILINE)
    if start is None:
        return f"{text}\n{header}", "", ""
    body = re.match(r"(?:(?:  .*)?\n)*", text[start.end() :])
    assert body is not None
    lines = body[0].rstrip("\n") + "\n"
    stop = start.end() + len(lines)
    return text[: start.end()], lines, text[stop:]


def _without_key(text: str, key: str) -> str:
    """Return the text without the lines that set a key."""
    header, pattern = _key_pattern(key)
    before, lines, after = _split_section(text, header)
    return before + pattern.sub("", lines) + after


def _with_key(text: str, key: str, value: Any) -> str:
    """Return the text with a key set to a value."""
    header, pattern = _key_pattern(key)
    before, lines, after = _split_section(text, header)
    line = f"  {key.partition('.')[2]}: {flow(value)} # from the command line\n"
    changed_lines, num_changed = pattern.subn(lambda _: line, lines, count=1)
    return before + (changed_lines if num_changed else line + lines) + after
