"""Load the tokenizer of a run with the chat template that the config chooses.

The template and its options become part of the tokenizer. Training, evaluation, generation and exports therefore use
the same template, and so do inference engines that load the exported folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.schema import Config
from omnizoo.models.read_config import load_tokenizer


def load_chat_tokenizer(config: Config) -> Any:
    """Load the tokenizer of a run, with `data.chat_template` and `data.template_options`.

    Args:
        config: The config of the run.

    Returns:
        The tokenizer.

    Raises:
        UserError: If the tokenizer or the template cannot be read, or the tokenizer has no template for the options.
    """
    tokenizer = load_tokenizer(config.model)
    if config.data.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(config.data.chat_template))
    options = config.data.template_options
    if options:
        tokenizer.chat_template = _with_options(tokenizer.chat_template, options)
    return tokenizer


def _read_template(file: Path) -> str:
    """Return the Jinja source of a chat template."""
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {file} cannot be read: {named_line(error)}") from error
    if not source.strip():
        raise UserError(f"data.chat_template: {file} is empty. Write a Jinja template to it.")
    return source


def _with_options(template: Any, options: Mapping[str, Any]) -> Any:
    """Return a chat template in which the options are defaults, so that a caller can still set other values."""
    if not template:
        names = ", ".join(options)
        raise UserError(
            f"data.template_options: {names} need a chat template, but the tokenizer has none. Set data.chat_template."
        )
    if isinstance(template, dict):  # several templates by name
        return {name: _with_options(source, options) for name, source in template.items()}
    defaults = ""
    for name, value in options.items():
        literal = json.dumps(value, ensure_ascii=False)
        defaults += f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
    return defaults + "{{- '' }}" + template
