"""Words that a shell can complete: commands, their arguments, and config keys with their values."""

import argparse
from dataclasses import dataclass

from omnizoo.cli.help.config_keys import plain_key
from omnizoo.cli.parser import COMMANDS, TAKE_OVERRIDES, build_parser, path_argument
from omnizoo.config import reference


@dataclass(frozen=True)
class Argument:
    """One option of a command, or a positional argument."""

    flags: tuple[str, ...]  # names of the option, such as ("-v", "--verbose"); empty for a positional argument
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    is_path: bool = False


@dataclass(frozen=True)
class Command:
    """A command, with its summary and arguments."""

    name: str
    summary: str
    takes_overrides: bool
    options: tuple[Argument, ...]
    positionals: tuple[Argument, ...]


def commands() -> list[Command]:
    """Return all commands, as the parser defines them."""
    subparsers = build_parser().commands
    return [_command(name, subparsers[name]) for name in COMMANDS]


def config_keys() -> list[reference.Key]:
    """Return all config keys that can be set on the command line."""
    return reference.all_keys()


def named_mappings() -> list[str]:
    """Return the keys of mappings with names that the user chooses, such as `model.modalities`."""
    prefixes = {key.key.partition(".NAME.")[0] for key in reference.all_keys() if ".NAME." in key.key}
    return sorted(prefixes)


def section_names() -> list[str]:
    """Return the names of config sections that `--help` accepts, including nested sections."""
    parents = {plain_key(key.key).rpartition(".")[0] for key in reference.all_keys()}
    return sorted(parents)


def _command(name: str, parser: argparse.ArgumentParser) -> Command:
    """Describe a command by the arguments of its subparser."""
    arguments = [_argument(action) for action in parser._actions]
    return Command(
        name=name,
        summary=COMMANDS[name],
        takes_overrides=name in TAKE_OVERRIDES,
        options=tuple(argument for argument in arguments if argument.flags),
        positionals=tuple(argument for argument in arguments if not argument.flags),
    )


def _argument(action: argparse.Action) -> Argument:
    """Describe an argument of a command for completion."""
    choices = [str(choice) for choice in action.choices or ()]
    is_positional = not action.option_strings
    if action.metavar == "SECTION":
        choices = section_names()
    return Argument(
        flags=tuple(action.option_strings),
        help=action.help or "",
        takes_value=action.nargs != 0,
        choices=tuple(choices),
        is_path=not choices and (is_positional or action.type in (path_argument,) or action.metavar == "FILE"),
    )
