"""Copy the media of held-out prompts to the run folder, for the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnizoo.modalities.files.preview import displayed_type
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.reporting.run_folder import RunFolder

MAX_COPIED = 32 * 2**20  # bytes; larger files are listed by name
MAX_SHOWN = 200  # maximum number of characters of a value or name


def copy_media(items: Sequence[MediaItem], run: RunFolder, folder: Path) -> list[dict[str, str]]:
    """Copy the media of a prompt to `folder` in the run folder.

    Only files that browsers display are copied. Their type is inferred from their content, never from their name.

    Returns:
        A description of each item, with its `modality` and either its `file` (relative to the run folder) or its
        `value`, as text.
    """
    described: list[dict[str, str]] = []
    values: list[Any] = []
    for item in items:
        media = item.media
        if any(media.value is value for value in values):  # the same value as an earlier item: the audio of a video
            continue
        values.append(media.value)
        file = _copy(media, folder / str(len(described)))
        if file is not None:
            described.append({"modality": media.modality, "file": str(file.relative_to(run.root))})
        else:
            is_file = isinstance(media.value, Path | bytes)
            text = media.name if is_file else repr(media.value)
            described.append({"modality": media.modality, "value": text[:MAX_SHOWN]})
    return described


def _copy(media: Media, stem: Path) -> Path | None:
    """Copy a media item to a file whose path starts with `stem`, and return the path.

    None if the item is not a file, is too large, cannot be read or written, or cannot be displayed by browsers.
    """
    if not isinstance(media.value, Path | bytes):
        return None
    try:
        with media.open() as source:
            content = source.read(MAX_COPIED + 1)
        suffix = displayed_type(content)
        if suffix is None or len(content) > MAX_COPIED:
            return None
        file = stem.with_name(stem.name + suffix)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except (BadMedia, OSError):  # the evaluation continues, because it does not need the copy
        return None
    return file
