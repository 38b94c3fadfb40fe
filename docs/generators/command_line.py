"""Command-line reference from the argument parser."""

import argparse

from generators.markdown import directive, sentence
from omnizoo.cli.parser import COMMANDS, TAKE_OVERRIDES, build_parser

# Arguments without a help text of their own.
HELP = {"config": "YAML file with the configuration", "nproc": "number of processes to start on this machine"}
OVERRIDES = "Accepts [`--section.key value`](configuration.md) for every key of the configuration."


def commands() -> str:
    """Return a section for each command: summary, usage, arguments and options."""
    subparsers = build_parser().commands
    return "\n".join(_command(name, subparsers[name]) for name in COMMANDS)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"## {name}\n", sentence(COMMANDS[name]) + "\n"]
    if name in TAKE_OVERRIDES:
        parts.append(OVERRIDES + "\n")
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parts.append(f"```text\n{_wrap(usage)}\n```\n")
    parts.append(directive("program", f"omnizoo {name}", {}, ""))
    for action in parser._actions:
        if "-h" not in action.option_strings:
            parts.append(_argument(action))
    return "\n".join(parts)


def _wrap(usage: str, width: int = 100) -> str:
    """Break a usage line between arguments, with later lines indented."""
    lines = [""]
    for word in usage.replace(" [", "\n[").split("\n"):
        if len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def _argument(action: argparse.Action) -> str:
    """Return an entry for a flag or a positional argument."""
    text = sentence(action.help or HELP.get(action.dest, ""))
    name = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return directive("option", name, {}, text)
    if action.nargs == 0:
        return directive("option", ", ".join(action.option_strings), {}, text)
    value = name if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
    return directive("option", ", ".join(f"{flag} {value}" for flag in action.option_strings), {}, text)
