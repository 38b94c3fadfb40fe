"""Render the Jinja2 templates of the files that commands write."""

import json
import shlex
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_file(template: str, **values: Any) -> str:
    """Render a template in `omnizoo/cli/templates` and return the text."""
    environment = Environment(
        loader=PackageLoader("omnizoo.cli"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["shell_quoted"] = shlex.quote
    environment.filters["fish_quoted"] = fish_quoted
    environment.filters["grouped"] = "{:,}".format
    return environment.get_template(template).render(values)


def fish_quoted(text: str) -> str:
    """Quote text for the fish shell. Inside single quotes, a backslash escapes single quotes and backslashes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
