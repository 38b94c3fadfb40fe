"""Writes the generated parts of the site from the code: schema, parser, docstrings, constants, error texts.

Nothing here imports torch. `docs/conf.py` runs all generators at the start of each build. Fragments go to
`docs/_generated`, from where hand-written pages include them; both folders below are ignored by git.
"""

from collections.abc import Callable
from pathlib import Path

from generators import command_line, components, configuration, error_messages, foreign_keys, models, python_api, rows

# File below `docs` -> function that returns its text.
FRAGMENTS: dict[str, Callable[[], str]] = {
    "_generated/configuration.md": configuration.section_list,
    "_generated/cli.md": command_line.commands,
    "_generated/python_api.md": python_api.public_names,
    "_generated/row_formats.md": rows.formats,
    "_generated/metadata_fields.md": rows.metadata_fields,
    "_generated/speakers.md": rows.speakers,
    "_generated/limits.md": rows.limits,
    "_generated/encoders.md": components.encoders,
    "_generated/projectors.md": components.projectors,
    "_generated/decoders.md": components.decoders,
    "_generated/losses.md": components.losses,
    "_generated/optimizers.md": components.optimizers,
    "_generated/errors.md": error_messages.messages_by_key,
    "_generated/foreign_keys.md": foreign_keys.replacements,
}


def generate_all(docs: Path) -> None:
    """Write all generated files below `docs`. Files whose text has not changed are not touched."""
    for name, text in configuration.pages().items():
        write_if_changed(docs / "reference" / "configuration" / f"{name}.md", text)
    for name, write_text in FRAGMENTS.items():
        write_if_changed(docs / name, write_text())
    models.write_table(docs / "_generated" / "models.md")


def write_if_changed(path: Path, text: str) -> None:
    """Write a file unless it has this text already, so that Sphinx does not read its pages again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
