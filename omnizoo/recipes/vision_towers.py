"""How pictures enter published models other than Qwen's: their own towers as encoders, their own processors for pixels.

An encoder here has no weights: it calls the model it was made for. A picture is one square or several that do not see
each other (`TileTower`), or patches of any shape (`PatchTower`). What an item gives depends on the item alone, and
nothing is read back from the device.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Encoder, Inputs, Modality, Size
from omnizoo.modalities.files import PICTURE_OPTIONS, picture_size, read_picture
from omnizoo.modalities.image import thumbnail
from omnizoo.modalities.item import Media
from omnizoo.modalities.tally import Tally
from omnizoo.modalities.tower import Work, check_settings
from omnizoo.models.hf_private import PACKED, attend_packed, attention_name
from omnizoo.models.media_batch import Features
from omnizoo.recipes.qwen_towers import put

log = logging.getLogger(__name__)
MOST_TILES = 4  # of a part of a picture: ranks share out what is larger
Kinds = Mapping[str, tuple[Callable[..., Encoder], str, Sequence[str]]]
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class VisionTower(Encoder):
    """The module `name` of a published model, with the module after it that makes its features fit the text."""

    item_options = PICTURE_OPTIONS

    def __init__(self, model: PreTrainedModel, name: str, projector: str) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, where torch does not look: the model must not become its own part's child
        self.name, self.projector_name = name, projector

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def tower(self) -> Any:
        return self.model.get_submodule(self.name)

    @property
    def projector(self) -> Any:
        return self.model.get_submodule(self.projector_name)

    @cached_property
    def work(self) -> tuple[Work, float]:
        """FLOPs of the tower, and of a place after it."""
        work = self.tower_work()
        place = Tally(work.trained)
        place.run(self.projector, 1)
        return work, place.flops

    def tower_work(self) -> Work:
        return Work.of(self.tower)

    def preview(self, media: Media) -> str:
        return thumbnail(read_picture(media), media.name)


class TileTower(VisionTower):
    """Pictures as squares of `edge` pixels, each of which becomes `patches` patches and then takes `each` places."""

    def __init__(
        self, model: PreTrainedModel, name: str, projector: str, processor: Any, edge: int, patches: int, each: int
    ) -> None:
        super().__init__(model, name, projector)
        self.processor, self.edge, self.patches, self.each = processor, edge, patches, each

    def tiles(self, height: int, width: int) -> int:
        """How many squares a picture of this size becomes."""
        return 1

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        """Of so many squares: text and places, as the published processor writes them; (): one run."""
        return ()

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[tiles, channels, edge, edge]` -> `[tiles, each, width]`."""
        features: torch.Tensor = self.model.get_image_features(pixels, return_dict=True).pooler_output
        return features

    def measure(self, media: Media) -> Size:
        tiles = self.tiles(*picture_size(media))
        return self.size_of(tiles, self.layout(tiles))

    def size_of(self, tiles: int, layout: tuple[str | int, ...]) -> Size:
        return Size(tiles * self.each, tiles * self.cost, layout=layout)

    @cached_property
    def cost(self) -> float:
        """FLOPs of one square."""
        tower, place = self.work
        return tower.flops(self.patches) + self.each * place

    def prepare(self, media: Media) -> Inputs:
        out = self.processor(images=read_picture(media), return_tensors="pt")
        return {"pixels": out["pixel_values"].flatten(0, -4)}

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        pieces = inputs["pixels"].split(MOST_TILES)
        if len(pieces) == 1:
            return [(size, inputs)]
        # A view would travel whole.
        return [
            (replace(size, places=len(p) * self.each, cost=len(p) * self.cost), {"pixels": p.clone()}) for p in pieces
        ]

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(1, 3, self.edge, self.edge)}

    def places(self, inputs: Inputs) -> int:
        return len(inputs["pixels"]) * self.each

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        return self.features(torch.cat([item["pixels"] for item in items])).flatten(0, 1)


class PatchTower(VisionTower):
    """Pictures of any shape: their patches follow each other in one sequence, in which each picture sees itself."""

    def __init__(self, model: PreTrainedModel, name: str, projector: str) -> None:
        super().__init__(model, name, projector)
        self.is_packed = attention_name(model) == PACKED
        if self.is_packed:
            attend_packed(self.tower)

    def size_of(self, patches: int, places: int, layout: tuple[str | int, ...]) -> Size:
        tower, place = self.work
        return Size(places, tower.flops(patches) + places * place, layout=layout)


def build_vision(
    kinds: Kinds,
    model: PreTrainedModel,
    folder: str | None,
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Modality]:
    """`kinds`: by modality its encoder, its placeholder, and the other special tokens that are written with it."""
    built = {}
    for name, (encoder, placeholder, marks) in kinds.items():
        given = options.get(name, {})
        try:
            signature(encoder).bind(model, folder, **given)
        except TypeError as error:
            raise UserError(f"model.modalities.{name}.encoder.options: {error}") from error
        built[name] = Modality(name, encoder(model, folder, **given), None, "", placeholder, "", tuple(marks))
    return built


def enter_features(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Put features among the embeddings, by index: the model would pick their places by masks, which the host has to
    wait for. Of every modality, so that every rank builds one graph."""
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    for arrived in features.values():
        embeddings = put(embeddings, arrived.index, arrived.values)
    return inputs | {"input_ids": None, "inputs_embeds": embeddings}


def image_processor(kind: Any, folder: str | None, published: Mapping[str, Any], **own: Any) -> Any:
    """The processor that prepares pictures, as the folder says, else as published; `own` is what the model itself, or
    an option of the user's, decides."""
    own = {key: value for key, value in own.items() if value is not None}
    if folder is None or not any((Path(folder) / file).is_file() for file in PROCESSOR_FILES):
        if folder is not None:
            log.info("%s has no %s: pictures are prepared as published", folder, PROCESSOR_FILES[0])
        return kind(**dict(published) | own)
    try:
        made = kind.from_pretrained(folder, **own)
    except (OSError, ValueError, TypeError, KeyError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: {PROCESSOR_FILES[0]} does not describe a {kind.__name__}: {line}") from error
    check_settings(f"{folder}: {PROCESSOR_FILES[0]}", made)
    return made
