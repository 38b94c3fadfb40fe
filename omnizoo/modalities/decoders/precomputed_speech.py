"""Spoken responses as codec codes, frames x codebooks, and the voices of models that store them in a file.

Codes come from lists of numbers, from files, or from audio by a codec plugin.
"""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import CODE_ERRORS
from omnizoo.modalities.files.audio import read_audio
from omnizoo.modalities.media import BadMedia, Media

Codes = npt.NDArray[np.int64]  # [frames, codebooks]
Codec = Callable[[npt.NDArray[np.float32], int], Any]  # (samples in -1..1, sampling rate) -> codes

FILES = (".npy", ".safetensors")
# Voices of a model folder, as tensors NAME.bos_token, NAME.cond and NAME.ref_mel. Published folders store them as a
# pickle. OmniZoo never reads that pickle, but writes one, because the classes of transformers require it.
VOICES, PICKLED_VOICES = "spk_dict.safetensors", "spk_dict.pt"


@dataclass(frozen=True)
class Voice:
    token: int  # id of the text token that precedes the speech
    conditioning: torch.Tensor  # [1, C], for the codec
    reference: torch.Tensor  # [1, T, M], mel spectrogram for the codec


def read_codes(media: Media, sizes: Sequence[int], most: int, codec: Codec | None, rate: int) -> Codes:
    """Return the codes `[frames, codebooks]` of an item.

    Args:
        media: Codes, a file with codes, or audio.
        sizes: Number of codes in each codebook.
        most: Maximum number of frames.
        codec: Plugin that converts audio to codes.
        rate: Sampling rate that `codec` receives.

    Raises:
        BadMedia: If the codes are invalid, or if audio is given without a codec.
    """
    found = _read(media, codec, rate)
    try:
        codes = np.asarray(found)
    except ValueError:  # raised for rows of different lengths
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
    """Whether an item consists of codes (integers, or a file with integers). Otherwise it is audio."""
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
    sound = read_audio(media, rate)
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


def read_voices(content: bytes, sizes: Mapping[str, int], what: str) -> dict[str, Voice]:
    """Return the voices in the content of a file, by name in lower case.

    Args:
        content: Content of a safetensors file.
        sizes: Size of the last dimension of `cond` and `ref_mel`.
        what: Name of the file for error messages.
    """
    try:
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise UserError(
            f"{what} cannot be read: {named_line(error)}; expected tensors, see docs/how-to/speech.md"
        ) from error
    found: dict[str, Voice] = {}
    for name in sorted({key.rpartition(".")[0] for key in tensors}):
        token, conditioning, reference = (tensors.get(f"{name}.{part}") for part in ("bos_token", "cond", "ref_mel"))
        if token is None or conditioning is None or reference is None:
            raise UserError(f"{what}: {name!r} is no whole voice; expected NAME.bos_token, NAME.cond and NAME.ref_mel")
        if token.numel() != 1 or token.is_floating_point() or int(token) < 0:
            raise UserError(f"{what}: {name}.bos_token is no token; expected one whole number, at least 0")
        for key, tensor, dims in (("cond", conditioning, 2), ("ref_mel", reference, 3)):
            shape = tuple(tensor.shape)
            if tensor.ndim != dims or shape[0] != 1 or shape[-1] != sizes[key] or not tensor.numel():
                wanted = f"1 x {sizes[key]}" if dims == 2 else f"1 x frames x {sizes[key]}"
                raise UserError(f"{what}: {name}.{key} is {' x '.join(map(str, shape))}; expected {wanted}")
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise UserError(f"{what}: {name}.{key} has values that are no finite floats")
        if name.lower() in found:
            raise UserError(f"{what} has {name!r} twice, in letters of another case")
        found[name.lower()] = Voice(int(token), conditioning.float(), reference.float())
    return found


def write_pickled_voices(file: Path, folder: Path) -> None:
    """Write the voices into `folder` in the format that transformers reads (`weights_only`)."""
    voices: dict[str, dict[str, Any]] = {}
    for key, tensor in load(file.read_bytes()).items():
        name, _, part = key.rpartition(".")
        voices.setdefault(name, {})[part] = int(tensor) if part == "bos_token" else tensor
    torch.save(voices, folder / PICKLED_VOICES)
