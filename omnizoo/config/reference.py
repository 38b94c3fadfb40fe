"""Every config key with its type, default and meaning, read off the schema: the one source of `omnizoo train --help`,
of the expectations in error messages, and of docs/configuration.md.

`python -m omnizoo.config.reference > docs/configuration.md` writes that page anew.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from omnizoo.config.schema import Config
from omnizoo.config.section import Given, Section

NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null", dict: "mapping"}
SIGNS = [("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("min_length", "of length >=")]

PREAMBLE = """\
# Configuration

<!-- Generated from the sections in omnizoo/config by `python -m omnizoo.config.reference > docs/configuration.md`. -->

A config is one YAML file, and any key can be set on the command line as well, which wins over the file:

```
omnizoo train my.yaml --train.lr 1e-3 --data.sources.0.path corpus.jsonl --model.config.num_hidden_layers 2
```

- `--section.key value` and `--section.key=value` are the same. Values are YAML: `true`, `null`, `[a, b]`, `{path: x}`.
- Items of a list go by their index (`N` in the tables): `--data.sources.0.weight 2`; one past the last appends.
- Modalities go by their name (`NAME` in the tables): `--model.modalities.sensor.encoder.freeze true`.
- Relative paths are relative to the working directory of the command, not to the config file.
- Numbers are read as in YAML 1.2: `1e-3` is a number, `yes`, `on` and `2024-01-01` are text.
- Types are strict: `steps: "10"` is an error. An integer is fine where a number is expected.
- Unknown keys and repeated keys are errors, and so is a value out of range; all of them are reported at once. That
  holds for the fields of an inline `model.config`, too: they are those of the family's Hugging Face config.
- Upper bounds are far above what any run needs. They are there so that a slip (`lanes: 10000000`) is an error rather
  than a run that never begins.
- A config has at most 512 KiB, 20,000 values (aliases counted out) and 64 levels; YAML tags are refused.
- The run folder keeps the complete config, defaults included, as `config.yaml`: `omnizoo train` takes it as it is.
"""


class Key(NamedTuple):
    key: str  # dotted; N stands for an index, NAME for a name of the user's choice
    type: str
    default: str
    description: str


def keys() -> list[Key]:
    """Every key a user can set, in the order of the schema."""
    return list(_keys_of(Config, ""))


def sections() -> dict[str, str]:
    """Section name -> what it is about."""
    return {name: field.description or "" for name, field in Config.model_fields.items()}


def schema_key(key: str) -> str:
    """A key as the tables write it: `data.sources.0.path` -> `data.sources.N.path`."""
    for mapping in _named():
        key = re.sub(rf"^({re.escape(mapping)})\.[^.]+", r"\1.NAME", key)
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", key)


@cache
def _named() -> frozenset[str]:
    """Mappings whose keys are names of the user's choice."""
    return frozenset(known.key.partition(".NAME.")[0] for known in keys() if ".NAME." in known.key)


def _keys_of(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        key = prefix + name
        if key not in Config.model_fields:  # those are the headings
            yield Key(key, type_text(field), _default_text(field), field.description or "")
        for nested, place in _sections_in(field.annotation):
            yield from _keys_of(nested, f"{key}.{place}")


def _sections_in(annotation: Any) -> Iterator[tuple[type[Section], str]]:
    """The section that `annotation` is, may be, or holds several of; and how keys go on to it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ""
    elif origin in (Union, UnionType):
        yield from (found for arg in args for found in _sections_in(arg))
    elif origin in (list, dict):
        place = "N." if origin is list else "NAME."
        yield from ((section, place + rest) for section, rest in _sections_in(args[-1]))


def type_text(field: FieldInfo) -> str:
    return _with_bounds(_annotation_text(field.annotation), field.metadata)


def _with_bounds(text: str, metadata: Sequence[Any]) -> str:
    if text == NAMES[str]:  # never empty: not worth a word each time
        return text
    found = [(sign, getattr(bound, name)) for bound in metadata for name, sign in SIGNS if hasattr(bound, name)]
    bounds = [f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}" for sign, bound in found]
    return " ".join([text, ", ".join(bounds)]).strip()


def _annotation_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "{" + ", ".join(annotation.model_fields) + "}"
    if origin is Annotated:
        return _with_bounds(_annotation_text(args[0]), args[1].metadata)
    if origin is dict and any(_sections_in(annotation)):
        return f"mapping of NAME to {_annotation_text(args[1])}"
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(_annotation_text(arg) for arg in args if arg is not Given)  # no file can hold one
    if origin is list:
        return f"list of {_annotation_text(args[0])}"
    if origin is tuple:
        return "[" + ", ".join(_annotation_text(arg) for arg in args) + "]"
    return NAMES[origin or annotation]


def _default_text(field: FieldInfo) -> str:
    return "required" if field.is_required() else _value_text(field.get_default(call_default_factory=True))


def _value_text(value: Any) -> str:
    if isinstance(value, Section):
        given = [key for key in type(value).model_fields if key in value.model_fields_set]
        return "{" + ", ".join(f"{key}: {_value_text(getattr(value, key))}" for key in given) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def markdown() -> str:
    page = [PREAMBLE]
    for section, about in sections().items():
        page += [
            f"## {section}\n",
            f"{about[:1].upper()}{about[1:]}.\n",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        page += [
            f"| `{key.key}` | {key.type} | `{key.default}` | {_in_table(key.description)} |"
            for key in keys()
            if key.key.startswith(section + ".")
        ]
        page.append("")
    return "\n".join(page)


def _in_table(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(markdown(), end="")
