"""The files by which a published folder says how its media are prepared, for transformers' own processors."""

from pathlib import Path

CHAT_TEMPLATE = "chat_template.json"  # of a processor; a tokenizer writes its own, as chat_template.jinja
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", CHAT_TEMPLATE)


def processor_files(folder: str | Path | None) -> list[Path]:
    """Those that a folder has, but for the chat template."""
    names = [name for name in PROCESSOR_FILES if name != CHAT_TEMPLATE]
    return [Path(folder) / name for name in names if (Path(folder) / name).is_file()] if folder else []
