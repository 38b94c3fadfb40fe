"""Read the config of another trainer: a YAML or JSON file, or the command line in a shell script."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.foreign.base import Trainer
from omnizoo.config.foreign.lookup import TRAINERS, detect
from omnizoo.config.yaml_file import parse_yaml, read_text

SHELL = (".sh", ".bash", ".txt", ".slurm")
ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(\S*)$")
SEPARATORS = {"&&", "||", ";", "|", ">", ">>", "2>&1", "&"}


@dataclass(frozen=True)
class Source:
    """The config of another trainer."""

    file: Path
    trainer: Trainer
    fields: dict[str, Any]  # values by key, nested as in the file
    lines: dict[str, int]  # line number of each dotted key

    def place(self, key: str) -> str:
        """Return the location of a key, `FILE:LINE`."""
        line = self.lines.get(key)
        return f"{self.file}:{line}" if line else str(self.file)


def read_source(file: Path, trainer_name: str | None) -> Source:
    """Read a file, and detect its trainer if `trainer_name` is None."""
    text = read_text(file)
    is_script = file.suffix in SHELL or text.startswith("#!")
    fields: Any
    lines: dict[str, int] = {}
    trainer = None
    if is_script:
        fields, trainer = _read_script(text, file)
    else:
        fields, lines = parse_yaml(text, str(file))
    if not isinstance(fields, dict) or not fields:
        raise UserError(f"{file}: contains no config. Pass a YAML or JSON file, or a shell script.")
    trainer = TRAINERS[trainer_name] if trainer_name else trainer or detect(fields)
    if trainer is None:
        raise UserError(f"{file}: cannot detect the trainer. Pass --from {', '.join(TRAINERS)}.")
    return Source(file, trainer, fields, lines)


def _read_script(text: str, file: Path) -> tuple[dict[str, Any], Trainer | None]:
    """Return the arguments of the first command of a known trainer, with the variables that the script sets."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        words = _split(line, file)
        for name, value in variables.items():
            words = [word.replace(f"${{{name}}}", value).replace(f"${name}", value) for word in words]
        for word in words:
            assignment = ASSIGNMENT.match(word)
            if assignment is None:
                break
            variables[assignment[1]] = assignment[2]

        command = " ".join(words)
        for trainer in TRAINERS.values():
            match = re.search(trainer.command, command)
            if match:
                fields = _arguments(words, file)
                subcommand = next((name for name in match.groupdict().values() if name), None)
                if subcommand is not None:
                    fields.setdefault("command", subcommand)
                for word in words:
                    assignment = ASSIGNMENT.match(word)
                    if assignment is None:
                        break
                    fields[assignment[1]] = _scalar(assignment[2])
                return fields, trainer
        if sum(word.startswith("--") for word in words) > 2:
            return _arguments(words, file), None
    raise UserError(f"{file}: no command of a known trainer ({', '.join(TRAINERS)}) with arguments. Pass its config.")


def _split(line: str, file: Path) -> list[str]:
    """Split a line of a script into words. Comments are left out."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as a shell script: {error}. Copy the command to a file.") from None


def _arguments(words: Sequence[str], file: Path) -> dict[str, Any]:
    """Return the options of a command, `--name value ...` or `--name=value`, and the config file that it reads."""
    fields: dict[str, Any] = {}
    name = ""
    values: list[Any] = []

    def finish() -> None:
        if name:
            value = True if not values else values[0] if len(values) == 1 else list(values)
            _set(fields, name, value)

    for word in words:
        if word in SEPARATORS:
            break
        if word.startswith("--") and len(word) > 2:
            finish()
            name, equals, value = word[2:].partition("=")
            values = [_scalar(value)] if equals else []
        elif word.endswith(".py"):
            finish()
            name = ""
        elif name:
            values.append(_scalar(word))
        elif word.endswith((".yaml", ".yml", ".json")):
            referenced = Path(word) if Path(word).is_file() else file.parent / word
            if referenced.is_file():
                content, _ = parse_yaml(read_text(referenced), str(referenced))
                fields |= content if isinstance(content, dict) else {}
    finish()
    return fields


def _set(fields: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted key in nested mappings."""
    *parents, last = name.split(".")
    for parent in parents:
        inner = fields.setdefault(parent, {})
        if not isinstance(inner, dict):
            return
        fields = inner
    fields[last] = value


def _scalar(text: str) -> Any:
    """Return the value of an argument: a number, boolean, list or mapping, or the text itself."""
    try:
        value, _ = parse_yaml(text, "command line", key="argument")
    except UserError:
        return text
    return value
