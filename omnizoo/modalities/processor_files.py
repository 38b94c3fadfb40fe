"""Files of a model folder that configure the media processors of transformers."""

import json
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError

CHAT_TEMPLATE = "chat_template.json"  # template of a processor; a tokenizer has chat_template.jinja
NESTED = "processor_config.json"  # may contain the settings of all processors
PROCESSOR_FILES = (NESTED, "preprocessor_config.json", "video_preprocessor_config.json", CHAT_TEMPLATE)


def processor_files(folder: str | Path | None) -> list[Path]:
    """Return the processor files in a folder, except the chat template."""
    if not folder:
        return []
    files = [Path(folder) / name for name in PROCESSOR_FILES if name != CHAT_TEMPLATE]
    return [file for file in files if file.is_file()]


def processor_settings(folder: str | None, kind: str) -> tuple[dict[str, Any], str]:
    """Return the settings of a processor in a model folder ({} if there are none), and the name of their file.

    As in transformers, settings nested in `processor_config.json` take precedence over settings in a separate file.

    Args:
        folder: The model folder.
        kind: `image_processor`, `feature_extractor` or `video_processor`.
    """
    separate_file = "video_preprocessor_config.json" if kind == "video_processor" else "preprocessor_config.json"
    contents = {file.name: read_json_object(file) for file in processor_files(folder)}
    for name in (NESTED, separate_file):
        nested = contents.get(name, {}).get(kind)
        if isinstance(nested, dict):
            return nested, f"{folder}/{name}"
    return contents.get(separate_file, {}), f"{folder}/{separate_file}"


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        UserError: If the file does not contain a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: the file is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, not a {type(content).__name__}")
    return content
