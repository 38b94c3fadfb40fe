"""Items whose frozen part was computed by `omnizoo data precompute`, and the safetensors shards that contain them.

A shard contains the tensors of several rows, named `ROW/NAME`. Its header has their shapes, so an item is measured
without reading its values.
"""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from omnizoo.config.errors import first_line
from omnizoo.modalities.item import Inputs, MediaSize, Port
from omnizoo.modalities.media import BadMedia

TARGETS = "targets"  # name of stored targets, also in the inputs of an item
MAX_HEADER_BYTES = 100 << 20  # limit of the safetensors format


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one item in a shard."""

    shard: Path
    key: str  # the names of the tensors begin with `KEY/`

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, keyed by name, without reading values.

        Raises:
            BadMedia: If the shard cannot be read, or lacks the item.
        """
        shapes = {}
        for name, shape in read_header(self.shard).items():
            if name.startswith(f"{self.key}/"):
                shapes[name.removeprefix(f"{self.key}/")] = shape
        if not shapes:
            raise BadMedia(f"{self.shard}: no tensors of {self.key}. Run omnizoo data precompute again.")
        return shapes

    def read(self) -> Inputs:
        """Return the tensors, keyed by name.

        Raises:
            BadMedia: If the shard cannot be read, or a value is not finite.
        """
        tensors: Inputs = {}
        names = self.shapes()
        try:
            with safe_open(self.shard, framework="pt") as file:
                for name in names:
                    tensors[name] = file.get_tensor(f"{self.key}/{name}")
        except (OSError, SafetensorError) as error:
            raise BadMedia(f"{self.shard}: cannot be read: {first_line(error)}") from None
        not_finite = not_finite_names(tensors)
        if not_finite:
            raise BadMedia(f"{self.shard}: {self.key}/{not_finite[0]} has values that are not finite")
        return tensors


@dataclass(frozen=True)
class PrecomputedItem:
    """Encoded latents of a row, and its encoded prompt. It takes the place of the item's value (`Media.value`)."""

    tensors: StoredTensors
    conditions: tuple[StoredTensors, ...]  # the encoded prompt first
    empty_conditions: tuple[StoredTensors, ...]  # the same for the empty prompt

    @property
    def name(self) -> str:
        """The name of the item in messages."""
        return f"{self.tensors.shard}: item {self.tensors.key}"

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of the latents before normalization, channels first."""
        return self.tensors.shapes()["mean"]

    @property
    def text_tokens(self) -> int:
        """Number of text tokens of the prompt."""
        return self.conditions[0].shapes()["text"][0]

    @property
    def empty_text_tokens(self) -> int:
        """Number of text tokens of the empty prompt."""
        return self.empty_conditions[0].shapes()["text"][0]

    def read(self, empty_text: bool = False) -> Inputs:
        """Return the tensors of the item, with those of the empty prompt if `empty_text`.

        Raises:
            BadMedia: If a shard cannot be read, or a value is not finite.
        """
        tensors = self.tensors.read()
        for part in self.empty_conditions if empty_text else self.conditions:
            tensors |= part.read()
        return tensors


@dataclass(frozen=True)
class StoredTargets:
    """Targets of a decoder for one item. They take the place of the item's value (`Media.value`)."""

    tensors: StoredTensors
    port: Port
    size: MediaSize

    def read(self) -> Inputs:
        """Return the targets, in place of a prepared item.

        Raises:
            BadMedia: If the shard cannot be read.
        """
        return self.tensors.read()


def not_finite_names(tensors: Inputs) -> list[str]:
    """Return the names of the tensors that have a NaN or infinite value."""
    floating = [(name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()]
    return [name for name, tensor in floating if not tensor.isfinite().all()]


@lru_cache(maxsize=256)
def read_header(shard: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a safetensors file, keyed by name.

    Raises:
        BadMedia: If the file cannot be read.
    """
    try:
        with open(shard, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length:,} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
            size = file.seek(0, 2)
    except (OSError, ValueError, struct.error) as error:
        raise BadMedia(f"{shard}: not a safetensors file: {first_line(error)}") from None
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != 8 + length + end:
        raise BadMedia(f"{shard}: the file has {size:,} bytes, but its header describes {8 + length + end:,}")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}
