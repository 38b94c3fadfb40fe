"""`omnizoo completion`: print a completion script for a shell, generated from the parser and the config schema."""

import argparse

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  omnizoo completion bash > ~/.local/share/bash-completion/completions/omnizoo
  omnizoo completion zsh > DIR/_omnizoo      (DIR: a folder in $fpath)
  omnizoo completion fish > ~/.config/fish/completions/omnizoo.fish
  source <(omnizoo completion bash)          (only this bash)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo completion`."""
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script: bash, zsh or fish")
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    """Print the completion script of the chosen shell. Returns 0."""
    from omnizoo.cli.completion.words import commands, config_keys, named_mappings, section_names
    from omnizoo.cli.render_file import render_file

    script = render_file(
        f"completion.{args.shell}.jinja",
        commands=commands(),
        keys=config_keys(),
        named_mappings=named_mappings(),
        sections=section_names(),
    )
    print(script, end="")
    return 0
