"""Command-line parser of `omnizoo`, with one subparser per command.

Each command has a module with `add_arguments(parser)` and `run(args)`. Only the module of the chosen command is
imported. It imports torch and transformers inside `run`, so that `omnizoo --help` and config errors appear quickly.
"""

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from omnizoo.cli.help.options import add_help
from omnizoo.config.errors import UserError

MAX_PATH_LENGTH = 4096  # characters
COMMANDS = {
    "train": "Train a model as a YAML config describes",
    "eval": "Compute losses, metrics and responses on held-out data",
    "export": "Write a checkpoint as a Hugging Face folder",
    "generate": "Generate responses: text, and the media that the model produces",
    "doctor": "Check this machine and its packages",
    "plan": "Estimate memory, communication and speed without a device",
    "verify": "Compare layouts with one process",
    "data": "Show samples as the model receives them, or precompute latents and codes",
    "launch": "Print a job file for Slurm or Kubernetes",
    "convert": "Convert the config of another trainer",
    "new": "Write a first config for a model and data, or the files of a new modality",
    "report": "Write the report page of a run, or compare runs",
    "recipes": "List the model families that have a recipe, and the tests of each",
    "completion": "Print a completion script for bash, zsh or fish",
}
TAKE_OVERRIDES = ("train", "eval", "plan", "verify", "data", "launch", "new")  # commands with `--section.key value`


class Parser(argparse.ArgumentParser):
    """Parser that raises `UserError` for an invalid command line, instead of exiting."""

    commands: dict[str, "Parser"]  # subparser of each command; only set on the parser of `omnizoo`

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with a reference to the help of the command."""
        raise UserError(f"{message}; see `{self.prog} --help`")


def build_parser(commands: Iterable[str] = tuple(COMMANDS)) -> Parser:
    """Build the parser of `omnizoo`, without parsing a command line.

    Args:
        commands: Commands whose modules are imported to add their arguments. Other commands only have a summary.

    Returns:
        The parser. Its `commands` maps the name of each command to its subparser.
    """
    parser = Parser(prog="omnizoo", description="Train omni-modal models, from one CPU core to a cluster of GPUs.")
    parser.add_argument("--version", action="version", version=f"omnizoo {version('omnizoo')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=Parser)
    parser.commands = {}
    for name, summary in COMMANDS.items():
        takes_overrides = name in TAKE_OVERRIDES
        parser.commands[name] = subparsers.add_parser(
            name, help=summary, description=f"{summary}.", add_help=not takes_overrides, allow_abbrev=False
        )
        if takes_overrides:
            add_help(parser.commands[name])

    for name in commands:
        module = import_module(f"omnizoo.cli.{name}")
        module.add_arguments(parser.commands[name])
        parser.commands[name].set_defaults(run=module.run)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line.

    Returns:
        The arguments. `run` is the function to call, and `overrides` the list of `--section.key` flags.

    Raises:
        UserError: If the command or an argument is unknown or invalid. The message suggests a similar one.
    """
    command = argv[0] if argv else ""
    is_known = command in COMMANDS
    if command and not is_known and not command.startswith("-"):
        candidates = get_close_matches(command, COMMANDS, n=1) or list(COMMANDS)
        raise UserError(f"unknown command {command!r}; did you mean {' or '.join(candidates)}?")
    parser = build_parser([command] if is_known else [])

    # Overrides are removed first: argparse cannot tell the value of an unknown flag from a positional argument.
    overrides: list[str] = []
    other_args = argv
    if command in TAKE_OVERRIDES:
        overrides, other_args = split_overrides(argv)
    args, unknown = parser.parse_known_args(other_args, argparse.Namespace(overrides=overrides))
    if unknown:
        hint = suggest(unknown[0], parser.commands.get(command, parser))
        raise UserError(f"unknown argument {unknown[0]!r}; {hint}")
    if not hasattr(args, "run"):
        parser.error(f"expected a command: {', '.join(COMMANDS)}")
    return args


def path_argument(text: str) -> Path:
    """Return `text` as a path. Raises an error if it is empty, too long or contains a NUL character."""
    if not text or "\0" in text or len(text) > MAX_PATH_LENGTH:
        raise argparse.ArgumentTypeError("expected the name of a file or folder")
    return Path(text)


def allow_code(parser: argparse.ArgumentParser) -> None:
    """Add the flags that permit code which a model folder names or contains. Files cannot give this permission."""
    parser.add_argument(
        "--allow-code",
        metavar="MODULE",
        action="append",
        default=[],
        help="Python module that the model folder may import encoders and decoders from; includes its submodules; may "
        "be repeated (default: none)",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="permission to run Python code in the model folder"
    )


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the `--section.key` flags with their values, and all other arguments."""
    overrides: list[str] = []
    other_args: list[str] = []
    takes_value = False
    for arg in argv:
        flag, equals, _ = arg.partition("=")
        is_override = flag.startswith("--") and "." in flag
        is_value = takes_value and not arg.startswith("--")
        if is_override or is_value:
            overrides.append(arg)
        else:
            other_args.append(arg)
        takes_value = is_override and not equals
    return overrides, other_args


def suggest(argument: str, parser: argparse.ArgumentParser) -> str:
    """Return a hint about an unknown argument.

    The hint names a similar flag of the command, the full key (`--train.steps` for `--steps`), or the help command.
    """
    flag = argument.partition("=")[0]
    flags = {name: name for name in parser._option_string_actions}
    if parser.prog.split()[-1] in TAKE_OVERRIDES:
        from omnizoo.config import reference
        from omnizoo.config.foreign.lookup import hint_for

        hint = hint_for(flag.removeprefix("--"))
        if hint is not None:
            return hint
        keys = sorted((key.key for key in reference.all_keys()), key=lambda key: key.count("."))
        for key in reversed(keys):  # the last key, with the fewest levels, replaces the other keys
            last_part = key.rpartition(".")[2]
            flags[f"--{last_part}"] = f"--{key}"

    normalized = flag.replace("-", "_").replace("__", "--", 1)
    similar = get_close_matches(normalized, flags, n=1)
    if similar:
        return f"did you mean {flags[similar[0]]}?"
    return f"see `{parser.prog} --help`"
