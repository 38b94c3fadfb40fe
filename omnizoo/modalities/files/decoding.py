"""Shared helpers to decode media: limits, options, optional packages and errors.

Media come from untrusted sources, so every error of a parser becomes a `BadMedia` that names the item.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.versions import install_command
from omnizoo.modalities.media import BadMedia, Media

MAX_PIXELS = 1 << 26  # maximum number of pixels in one image or frame (8192 x 8192), checked before decoding
# Keys of `Media.options` that each kind of media reads.
IMAGE_OPTIONS: tuple[str, ...] = ()
AUDIO_OPTIONS = ("start", "end", "sampling_rate")
VIDEO_OPTIONS: tuple[str, ...] = ("start", "end", "fps")


def optional(module: str) -> Any:
    """Import a package of the `media` extra.

    Raises:
        UserError: If the package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        command = install_command("media")
        raise UserError(
            f"{package}: not installed, but the data has media that need it. Run `{command}` ({error})."
        ) from error


@contextmanager
def media_errors(media: Media) -> Iterator[None]:
    """Context manager that converts the errors of a parser to a `BadMedia` that names the item."""
    try:
        yield
    except (BadMedia, UserError):
        raise
    except Exception as error:
        message = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
        without_addresses = re.sub(r"\s*'?<[^>]*>'?", "", str(message).strip())  # such as <_io.BytesIO object at 0x...>
        reason = without_addresses or type(error).__name__
        raise BadMedia(f"{media.name}: {reason}") from error


def check_pixels(media: Media, height: int, width: int) -> None:
    """Raise `BadMedia` for images without pixels or with more than `MAX_PIXELS`."""
    if height < 1 or width < 1:
        raise BadMedia(f"{media.name}: the size is {width} x {height}, so the image has no pixels")
    if height * width > MAX_PIXELS:
        raise BadMedia(
            f"{media.name}: the image has {width} x {height} pixels, but at most {MAX_PIXELS:,} are supported"
        )
