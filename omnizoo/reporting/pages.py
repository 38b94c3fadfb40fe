"""HTML pages from Jinja2 templates: single files that need no network.

Templates escape all values, so no text from data or configs becomes markup.
"""

import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?[kMGT%])?")
MAX_CELL = 300  # maximum number of characters in a table cell
TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Render a template to HTML. The values depend on the template. Templates of complete pages need a `title`."""
    return _environment().get_template(template).render(date=time.strftime("%Y-%m-%d %H:%M"), **values)


def cell_text(value: Any) -> str:
    """Return the text of a value in a table cell, shortened to `MAX_CELL` characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_CELL else text[:MAX_CELL] + " …"


def is_number_text(value: Any) -> bool:
    """Whether a table cell contains a number, to right-align it. It may have a unit prefix or a percent sign."""
    return NUMBER.fullmatch(str(value)) is not None


@cache
def _environment() -> Environment:
    """Return the Jinja2 environment with the filters and tests that the templates use."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = cell_text
    environment.tests["number_text"] = is_number_text
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
