"""Shared helpers to decode media: limits, options, optional packages and errors.

Media come from untrusted sources, so every error of a parser becomes a `BadMedia` that names the item.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.modalities.media import BadMedia, Media

MOST_PIXELS = 1 << 26  # maximum of one image or frame, 8192 x 8192; checked before decoding
# Keys of `Media.options` that are read, by kind of media.
PICTURE_OPTIONS: tuple[str, ...] = ()
SOUND_OPTIONS = ("start", "end", "sampling_rate")
CLIP_OPTIONS: tuple[str, ...] = ("start", "end", "fps")


def optional(module: str) -> Any:
    """Import a package of the `media` extra.

    Raises:
        UserError: If the package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"this data has media that {module.split('.')[0]} reads: pip install omnizoo[media] ({error})"
        ) from error


@contextmanager
def parsing(media: Media) -> Iterator[None]:
    try:
        yield
    except (BadMedia, UserError):
        raise
    except Exception as error:
        reason = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
        reason = re.sub(r"\s*'?<[^>]*>'?", "", str(reason).strip()) or type(error).__name__  # remove object addresses
        raise BadMedia(f"{media.name}: {reason}") from error
