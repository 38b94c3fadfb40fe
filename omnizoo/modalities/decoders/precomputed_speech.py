"""Spoken responses as codec codes, `[frames, codebooks]`, and the voices of models that store voices in a file.

Codes are given as lists of numbers or as files, or a codec plugin computes them from audio.
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
    """A voice of a model that stores its voices in a file."""

    token: int  # id of the text token that precedes the speech
    conditioning: torch.Tensor  # [1, width], for the codec
    reference: torch.Tensor  # [1, frames, mel bins], mel spectrogram for the codec


def read_codes(media: Media, sizes: Sequence[int], max_frames: int, codec: Codec | None, rate: int) -> Codes:
    """Return the codes `[frames, codebooks]` of an item.

    Args:
        media: Codes, a file with codes, or audio.
        sizes: Number of codes in each codebook.
        max_frames: Maximum number of frames.
        codec: Plugin that converts audio to codes.
        rate: Sampling rate that `codec` receives.

    Raises:
        BadMedia: If the codes are invalid, or if audio is given without a codec.
    """
    value = _read(media, codec, rate)
    try:
        codes = np.asarray(value)
    except ValueError:  # raised for rows of different lengths
        codes = np.empty(0, object)
    if codes.ndim == 1 and len(sizes) == 1 and codes.dtype != object:
        codes = codes[:, None]

    expected = f"expected integers [frames, {len(sizes)} codebooks]"
    if codes.dtype == object:
        raise BadMedia(f"{media.name}: the rows of codes have different lengths; {expected}")
    if codes.dtype.kind not in "iu" or codes.ndim != 2:
        raise BadMedia(f"{media.name}: the codes are {_shape(codes)} of {codes.dtype}; {expected}")
    if codes.shape[1] != len(sizes):
        hint = ". Transpose them" if codes.shape[0] == len(sizes) else ""
        raise BadMedia(f"{media.name}: the codes are {_shape(codes)}; {expected}{hint}")
    if not 0 < len(codes) <= max_frames:
        raise BadMedia(f"{media.name}: the codes have {len(codes):,} frames; expected 1 to {max_frames:,}")
    for codebook, size in enumerate(sizes):
        lowest = int(codes[:, codebook].min())
        highest = int(codes[:, codebook].max())
        if lowest < 0 or highest >= size:
            invalid = lowest if lowest < 0 else highest
            raise BadMedia(
                f"{media.name}: code {invalid} in codebook {codebook} is out of range; expected 0 to {size - 1}"
            )
    return codes.astype(np.int64)


def is_codes(media: Media) -> bool:
    """Whether an item consists of codes (integers, or a file with integers). Otherwise it is audio."""
    value = media.value
    if isinstance(value, Path):
        return value.suffix in FILES
    is_samples = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return not is_samples and not isinstance(value, bytes | Mapping)


def _read(media: Media, codec: Codec | None, rate: int) -> Any:
    """Return the codes of an item, before any check."""
    value = media.value
    if is_codes(media):
        if not isinstance(value, Path):
            return value
        media.open().close()
        return _read_file(value)
    if codec is None:
        raise BadMedia(
            f"{media.name}: audio cannot be converted to codes without a codec. "
            f"Use `codes` (numbers, or a file {' or '.join(FILES)}), or set options.codec to a plugin."
        )
    samples = read_audio(media, rate)
    try:
        return codec(samples, rate)
    except CODE_ERRORS as error:
        raise BadMedia(f"{media.name}: options.codec raised an error: {named_line(error)}") from error


def _read_file(path: Path) -> Any:
    """Return the array in a file."""
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
            if len(names) != 1:
                raise BadMedia(f"{path}: the file contains {len(names)} tensors; expected one with codes")
            return tensors.get_tensor(names[0])
    except (OSError, ValueError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
        raise BadMedia(f"{path}: cannot be read: {named_line(error)}") from error


def _shape(array: npt.NDArray[Any]) -> str:
    return " x ".join(map(str, array.shape)) or "a single number"


def read_voices(content: bytes, sizes: Mapping[str, int], what: str) -> dict[str, Voice]:
    """Return the voices in the content of a file, keyed by lower-case name.

    Args:
        content: Content of a safetensors file.
        sizes: Size of the last dimension of `cond` and `ref_mel`.
        what: Name of the file for error messages.
    """
    try:
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise UserError(
            f"{what}: the file is not a safetensors file: {named_line(error)}. See docs/how-to/speech.md."
        ) from error
    voices: dict[str, Voice] = {}
    for name in sorted({key.rpartition(".")[0] for key in tensors}):
        token = tensors.get(f"{name}.bos_token")
        conditioning = tensors.get(f"{name}.cond")
        reference = tensors.get(f"{name}.ref_mel")
        if token is None or conditioning is None or reference is None:
            raise UserError(f"{what}: {name!r} is incomplete; expected NAME.bos_token, NAME.cond and NAME.ref_mel")
        if token.numel() != 1 or token.is_floating_point() or int(token) < 0:
            raise UserError(f"{what}: {name}.bos_token is not a token id; expected one integer that is at least 0")
        _check_voice_tensor(conditioning, f"{what}: {name}.cond", dims=2, width=sizes["cond"])
        _check_voice_tensor(reference, f"{what}: {name}.ref_mel", dims=3, width=sizes["ref_mel"])
        if name.lower() in voices:
            raise UserError(f"{what}: {name!r} occurs twice, with different case")
        voices[name.lower()] = Voice(int(token), conditioning.float(), reference.float())
    return voices


def _check_voice_tensor(tensor: torch.Tensor, what: str, dims: int, width: int) -> None:
    """Raise a `UserError` if a tensor of a voice is not `[1, width]` or `[1, frames, width]`, or is not finite."""
    shape = tuple(tensor.shape)
    if tensor.ndim != dims or shape[0] != 1 or shape[-1] != width or not tensor.numel():
        expected = f"1 x {width}" if dims == 2 else f"1 x frames x {width}"
        raise UserError(f"{what}: the shape is {' x '.join(map(str, shape))}; expected {expected}")
    if not tensor.is_floating_point() or not tensor.isfinite().all():
        raise UserError(f"{what}: some values are not finite floats")


def write_pickled_voices(file: Path, folder: Path) -> None:
    """Write the voices into `folder` in the format that transformers reads with `weights_only`."""
    voices: dict[str, dict[str, Any]] = {}
    for key, tensor in load(file.read_bytes()).items():
        name, _, part = key.rpartition(".")
        voices.setdefault(name, {})[part] = int(tensor) if part == "bos_token" else tensor
    torch.save(voices, folder / PICKLED_VOICES)
