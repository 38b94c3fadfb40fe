"""Spoken answers as codes of a codec: frames x codebooks. From lists of numbers, from files, or from sound by a codec
of the user's own."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from omnizoo.config.doors import CODE_ERRORS
from omnizoo.config.errors import named_line
from omnizoo.modalities.files import optional, read_sound
from omnizoo.modalities.item import BadMedia, Media

Codes = npt.NDArray[np.int64]  # [frames, codebooks]
Codec = Callable[[npt.NDArray[np.float32], int], Any]  # (samples in -1..1, samples per second) -> codes

FILES = (".npy", ".safetensors")


def read_codes(media: Media, sizes: Sequence[int], most: int, codec: Codec | None, rate: int) -> Codes:
    """The codes of an item, each codebook of its size, at most `most` frames. Sound goes through `codec`, at `rate`."""
    found = _read(media, codec, rate)
    try:
        codes = np.asarray(found)
    except ValueError:  # rows of different lengths
        codes = np.empty(0, object)
    wanted = f"expected whole numbers, frames x {len(sizes)} codebooks"
    if codes.ndim == 1 and len(sizes) == 1 and codes.dtype != object:
        codes = codes[:, None]
    if codes.dtype.kind not in "iu" or codes.ndim != 2:
        kind = "of different lengths" if codes.dtype == object else f"{_shape(codes)} of {codes.dtype}"
        raise BadMedia(f"the codes of {media.name} are {kind}; {wanted}")
    if codes.shape[1] != len(sizes):
        hint = ", and not codebooks x frames" if codes.shape[0] == len(sizes) else ""
        raise BadMedia(f"the codes of {media.name} are {_shape(codes)}; {wanted}{hint}")
    if not 0 < len(codes) <= most:
        raise BadMedia(f"the codes of {media.name} are {len(codes):,} frames; expected 1 to {most:,}")
    for book, size in enumerate(sizes):
        low, high = int(codes[:, book].min()), int(codes[:, book].max())
        if low < 0 or high >= size:
            odd = low if low < 0 else high
            raise BadMedia(f"the codes of {media.name} have {odd} in codebook {book}; expected 0 to {size - 1}")
    return codes.astype(np.int64)


def is_codes(media: Media) -> bool:
    """Whether an item is given as codes: whole numbers, or a file of them. If not, it is sound."""
    value = media.value
    if isinstance(value, Path):
        return value.suffix in FILES
    is_samples = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return not is_samples and not isinstance(value, bytes | Mapping)


def _read(media: Media, codec: Codec | None, rate: int) -> Any:
    value = media.value
    if is_codes(media):
        if not isinstance(value, Path):
            return value
        media.open().close()
        return _read_file(value)
    if codec is None:
        raise BadMedia(
            f"{media.name} is sound, and no codec turns it into codes: give `codes` (numbers, or a file "
            f"{' or '.join(FILES)}), or name a codec of your own (options.codec)"
        )
    sound = read_sound(media, rate)
    try:
        return codec(sound, rate)
    except CODE_ERRORS as error:
        raise BadMedia(f"the codec fails on {media.name}: {named_line(error)}") from error


def _read_file(path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
            if len(names) != 1:
                raise BadMedia(f"{path} has {len(names)} tensors; expected one, of codes")
            return tensors.get_tensor(names[0])
    except (OSError, ValueError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
        raise BadMedia(f"{path} cannot be read: {named_line(error)}") from error


def _shape(array: npt.NDArray[Any]) -> str:
    return " x ".join(map(str, array.shape)) or "a single number"


def write_sound(samples: npt.NDArray[np.float32], rate: int, stem: str) -> str:
    """As a wav file; returns its name."""
    name = f"{stem}.wav"
    optional("soundfile").write(name, samples, rate)
    return name
