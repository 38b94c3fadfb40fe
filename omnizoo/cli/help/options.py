"""Help options of commands that take a config: the sections, the keys of one section, or a search."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add `--help [SECTION]` and `--help-search WORD`."""
    parser.add_argument(
        "-h",
        "--help",
        action=ConfigHelp,
        nargs="?",
        metavar="SECTION",
        help="this help, or the keys of a config section, such as `data` or `data.sources`",
    )
    parser.add_argument(
        "--help-search",
        action=SearchHelp,
        nargs="+",
        metavar="WORD",
        help="config keys with all these words in their name or description",
    )


class ConfigHelp(argparse.Action):
    """Help action: the options of the command and the config sections, or the keys of one section."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, section: Any, __: str | None = None) -> NoReturn:
        from omnizoo.cli.help import config_keys

        if section is None:
            parser.print_help()
            config_keys.print_sections(parser.prog)
        else:
            config_keys.print_keys_of(str(section), parser.prog)
        parser.exit()


class SearchHelp(argparse.Action):
    """Help action that prints the config keys that match some words."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, words: str | Sequence[Any] | None, __: str | None = None
    ) -> NoReturn:
        from omnizoo.cli.help import config_keys

        config_keys.print_search([str(word) for word in words or ()], parser.prog)
        parser.exit()
