"""Print config keys: all sections, the keys of one section, or the keys that match a search."""

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnizoo.config import reference
from omnizoo.config.errors import UserError, printable, shorten
from omnizoo.config.foreign.lookup import hint_for
from omnizoo.config.reference import Key


def print_sections(prog: str) -> None:
    """Print the config sections, and how to list and search their keys. `prog` is the name of the command."""
    console = _console()
    console.print(Text("\nconfig sections:"))
    table = Table.grid(padding=(0, 2))
    for name, summary in reference.sections().items():
        table.add_row(Text(f"  {name}", "cyan"), Text(summary))
    console.print(table)
    console.print(
        Text(
            "\nSet any key in CONFIG, or as --section.key VALUE. The command line takes precedence. Values are YAML. "
            "Paths are "
            "relative to the working directory."
        )
    )
    commands = {
        f"{prog} --help data": "keys of a section, which may be nested (data.sources), or a single key (train.lr)",
        f"{prog} --help-search pack": "keys that mention a word",
        "omnizoo completion bash": "shell completion of commands, options and keys",
    }
    table = Table.grid(padding=(0, 2))
    for command, purpose in commands.items():
        table.add_row(Text(f"  {command}", "cyan"), Text(purpose))
    console.print(table)


def print_keys_of(name: str, prog: str) -> None:
    """Print the keys of the section `name`, or the key `name`.

    Indices and names may be left out: `data.sources.path` is `data.sources.N.path`.

    Raises:
        UserError: If there is no such section or key.
    """
    keys = reference.all_keys()
    plain_keys = {plain_key(key.key) for key in keys}
    wanted = plain_key(name)
    if wanted not in plain_keys:  # it contains an index or the name of a modality
        wanted = plain_key(reference.schema_key(name))
    in_section = [key for key in keys if plain_key(key.key).rpartition(".")[0] == wanted]
    if in_section:
        summary = reference.sections().get(wanted) or _description_of(wanted, keys)
        title = in_section[0].key.rpartition(".")[0]
        _console().print(Text.assemble((title, "bold"), f": {summary}\n"))
        _print_keys(in_section, keys, prog)
        return
    matches = [key for key in keys if plain_key(key.key) == wanted or key.key.rpartition(".")[2] == wanted]
    if not matches:
        raise UserError(f"--help: {_unknown(wanted, keys)}")
    _print_keys(matches, keys, prog)


def print_search(words: Sequence[str], prog: str) -> None:
    """Print the keys that contain all words in their name or description, with matching names first.

    Raises:
        UserError: If there is no such key.
    """
    lowered = [word.lower() for word in words]
    keys = reference.all_keys()
    by_name = [key for key in keys if all(word in key.key.lower() for word in lowered)]
    by_text = [key for key in keys if all(word in f"{key.key} {key.description}".lower() for word in lowered)]
    found = by_name + [key for key in by_text if key not in by_name]
    if not found:
        replacement = hint_for(words[0]) if len(words) == 1 else None
        hint = replacement or "Use fewer or shorter words"
        raise UserError(f"--help-search: no key contains {shorten(printable(json.dumps(list(words))))}; {hint}.")
    _print_keys(found, keys, prog)


def _print_keys(shown: Iterable[Key], keys: Sequence[Key], prog: str) -> None:
    """Print each key with its description, type and default, or with the help command for its nested keys."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for key in shown:
        details = f"{key.type}; " if not _has_nested(key, keys) else f"keys: {prog} --help {plain_key(key.key)}; "
        details += key.default if key.default == "required" else f"default {key.default}"
        table.add_row(f"--{key.key}", Text.assemble(key.description, "\n", (details, "dim")))
    _console().print(table)


def _has_nested(key: Key, keys: Iterable[Key]) -> bool:
    """Whether a key has nested keys."""
    return any(other.key.startswith(f"{key.key}.") for other in keys)


def plain_key(key: str) -> str:
    """Return a key without its placeholders `N` (an index) and `NAME` (chosen by the user)."""
    return ".".join(part for part in key.split(".") if part not in ("N", "NAME"))


def _description_of(section: str, keys: Iterable[Key]) -> str:
    """Return the description of the key that contains a section."""
    return next(key.description for key in keys if plain_key(key.key) == section)


def _unknown(name: str, keys: Iterable[Key]) -> str:
    """Return a message about a name that is neither a section nor a key."""
    replacement = hint_for(name)
    if replacement is not None:
        return f"{name} is not a key; {replacement}"
    last_parts = {key.key.rpartition(".")[2]: plain_key(key.key) for key in keys}
    known = last_parts | {plain: plain for plain in (plain_key(key.key) for key in keys)}
    known |= {section: section for section in reference.sections()}
    similar = [known[match] for match in get_close_matches(name, known, n=1)]
    hint = f"did you mean {similar[0]}?" if similar else f"sections: {', '.join(reference.sections())}"
    return f"{shorten(printable(name))} is neither a section nor a key; {hint}"


def _console() -> Console:
    """Return a console that is 100 columns wide if the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = 100
    return console
