"""Write a converted config as YAML, with the origin of each line and the keys that have no counterpart."""

from typing import Any

import yaml

from omnizoo.cli.convert.conversion import CHOOSE, Converted, section_names, shown
from omnizoo.config.errors import printable
from omnizoo.config.yaml_file import YamlDumper


def render(converted: Converted) -> str:
    """Return the text of the config."""
    source = converted.source
    lines = [f"# Converted from {source.trainer.title}: {source.file.name}"]
    if any(CHOOSE in comment or "required" in comment for comment in converted.comments.values()):
        lines.append(f"# Replace each {CHOOSE}.")
    for section in section_names():
        fields = converted.fields.get(section)
        if fields:
            lines += ["", f"{section}:"]
            lines += _mapping(fields, section, converted, "  ")
    if converted.unconverted:
        lines += ["", f"# Keys of {source.trainer.title} that are not in this config:"]
        lines += [f"# {key}: {shown(value)} -> {reason}" for key, value, reason in converted.unconverted]
    return "".join(f"{printable(line).rstrip()}\n" for line in lines)


def _mapping(fields: dict[str, Any], prefix: str, converted: Converted, indent: str) -> list[str]:
    """Return the lines of a mapping."""
    lines = []
    for name, value in fields.items():
        key = f"{prefix}.{name}"
        comment = converted.comments.get(key, "")
        suffix = f" # {comment}" if comment else ""
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{_scalar(name)}:{suffix}")
            lines += _mapping(value, key, converted, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{indent}{_scalar(name)}:{suffix}")
            for item in value:
                note = f" # {item['#']}" if "#" in item else ""
                entry = {field: part for field, part in item.items() if field != "#"}
                lines.append(f"{indent}  - {_flow(entry)}{note}")
        else:
            lines.append(f"{indent}{_scalar(name)}: {_flow(value)}{suffix}")
    return lines


def _scalar(name: str) -> str:
    return _flow(str(name))


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.dump(
        value, Dumper=YamlDumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").strip()
