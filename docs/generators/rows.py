"""Row formats, metadata fields and limits, from the constants that the data code uses."""

import ast
from typing import NamedTuple

from generators.markdown import code, table
from generators.source import assigned_value, constant

SCHEMAS = "omnizoo.data.rows.schemas"
FIELDS = "omnizoo.data.rows.unused_fields"
MESSAGES = "omnizoo.data.rows.messages"
TRAINED_ON = {
    "messages": "assistant messages",
    "text": "all tokens",
    "preference": "the responses, by the loss",
    "alpaca": "`output`",
    "prompt_completion": "`completion`; no chat template if both are texts",
    "query_response": "`response`",
    "caption": "the caption, after the media",
    "from_caption": "the media, after the caption",
    "document": "all tokens",
    "tokenized": "tokens whose label is not -100, or whose mask is 1; otherwise all tokens",
}


class Limit(NamedTuple):
    subject: str
    module: str
    constant: str
    unit: str


LIMITS = (
    Limit("line of JSONL, JSON array, or member of a tar", "omnizoo.data.sources.jsonl", "MAX_BYTES", "bytes"),
    Limit("rows of a Python iterable", "omnizoo.data.sources.python_rows", "MAX_ROWS_IN_MEMORY", "rows"),
    Limit("loss weight of a message or row", "omnizoo.data.rows.messages", "MAX_WEIGHT", ""),
    Limit("image, or frame of a video", "omnizoo.modalities.files.decoding", "MAX_PIXELS", "pixels"),
    Limit("scans of a progressive JPEG", "omnizoo.modalities.files.image", "MAX_SCANS", "scans"),
    Limit(
        "tiles of a TIFF, with their parts beyond the image",
        "omnizoo.modalities.files.tiff",
        "MAX_TILE_PIXELS",
        "pixels",
    ),
    Limit("all decoded frames of a video", "omnizoo.modalities.files.video", "MAX_VIDEO_PIXELS", "pixels"),
    Limit("ratio of the sides of an image", "omnizoo.modalities.encoders.image", "MAX_ASPECT_RATIO", ""),
    Limit("audio channels", "omnizoo.modalities.files.audio", "MAX_CHANNELS", "channels"),
    Limit(
        "chat template, per conversation: processor time", "omnizoo.data.rendering.chat_template", "MAX_SECONDS", "s"
    ),
    Limit("chat template, per conversation: memory", "omnizoo.data.rendering.chat_template", "MAX_MEMORY", "bytes"),
    Limit(
        "chat template, per conversation: text", "omnizoo.data.rendering.chat_template", "MAX_CHARACTERS", "characters"
    ),
)


def formats() -> str:
    """Return a table of row formats, in the order in which they are checked."""
    rows = []
    for name, fields in _format_rules().items():
        rows.append((code(name), fields, TRAINED_ON[name]))
    return table(("format", "fields", "trained on"), rows)


def _format_rules() -> dict[str, str]:
    """Return the description of the required fields of each format, by name."""
    names = ", ".join(code(word) for word in constant(SCHEMAS, "DOCUMENT"))
    rules: dict[str, str] = {}
    for node in ast.walk(assigned_value(SCHEMAS, "FORMATS")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Format":
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            name, rule = values[0], values[1]
            assert isinstance(name, ast.Constant)
            if isinstance(rule, ast.Constant):
                rules[str(name.value)] = str(rule.value)
            else:  # the only rule with inserted values lists the names of plain texts
                rules[str(name.value)] = f"no other content than a text in {names}"
    return rules


def metadata_fields() -> str:
    """Return the names of fields that are ignored without a setting."""
    names = sorted(constant(FIELDS, "METADATA_FIELDS"))
    return ", ".join(code(name) for name in names) + ". In messages, also `tool_call_id`.\n"


def speakers() -> str:
    """Return a table of the speaker names that ShareGPT and similar formats use."""
    roles: dict[str, list[str]] = {}
    for speaker, role in constant(MESSAGES, "SPEAKERS").items():
        roles.setdefault(role, []).append(code(speaker))
    roles["assistant, a tool call"] = [code(name) for name in constant(MESSAGES, "CALLS")]
    return table(("role", "also written as"), [(role, ", ".join(names)) for role, names in roles.items()])


def limits() -> str:
    """Return a table of the limits for rows and media."""
    rows = []
    for limit in LIMITS:
        value = constant(limit.module, limit.constant)
        path = limit.module.replace(".", "/") + ".py"
        rows.append((limit.subject, _amount(value, limit.unit), f"[`{path}`](../../{path})"))
    rates = assigned_value("omnizoo.modalities.files.audio", "SAMPLE_RATES")
    assert isinstance(rates, ast.Call)
    low, high = (ast.literal_eval(argument) for argument in rates.args)
    path = "omnizoo/modalities/files/audio.py"
    rows.append(("sampling rate of audio", f"{low:,} to {high:,} Hz", f"[`{path}`](../../{path})"))
    return table(("subject", "maximum", "constant in"), rows)


def _amount(value: float, unit: str) -> str:
    if unit == "bytes" and value >= 2**30:
        return f"{value / 2**30:g} GiB"
    if unit == "bytes":
        return f"{value / 2**20:g} MiB"
    return f"{value:,.0f} {unit}".strip()
