"""Pictures that published models produce as codes: the model's own VQ part, frozen, makes them and draws them again.

A decoder here has no weights: it calls the model it was made for. One picture at a time goes through the VQ part: in a
batch a code could be rounded to its neighbour.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.emu3.image_processing_emu3 import smart_resize

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, Inputs, Sampling, Size
from omnizoo.modalities.codes import code_loss
from omnizoo.modalities.files import PICTURE_OPTIONS, picture_size, read_picture
from omnizoo.modalities.frozen import forward_flops
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.pixels import picture_html
from omnizoo.modalities.tally import Tally
from omnizoo.modalities.tower import Work
from omnizoo.models.media_batch import Features
from omnizoo.ops.linear_cross_entropy import LinearHead, linear_cross_entropy_sum
from omnizoo.recipes.qwen_towers import Tower, preprocessor

SIZE_END, FRAME_END = "<|image token|>", "<|extra_201|>"  # around the places of a picture of Emu3
PUBLISHED_AREA = 720 * 720  # pixels that Emu3 draws by default


class SquareTower(Tower):
    """Pictures in, as squares of the one size that the tower takes."""

    item_options = PICTURE_OPTIONS

    def __init__(self, model: PreTrainedModel, processor: Any, tower: str, projector: str) -> None:
        super().__init__(model, tower)
        self.tower.config._attn_implementation = "sdpa"  # pictures come as a batch: there is nothing to pack
        self.processor, self.projector_name = processor, projector
        vision = self.tower.config
        self.edge: int = vision.image_size
        self.count: int = (vision.image_size // vision.patch_size) ** 2

    @property
    def projector(self) -> Any:
        return self.model.get_submodule(self.projector_name)

    @cached_property
    def work(self) -> float:
        """FLOPs of a picture."""
        tower = Work.of(self.tower)
        tally = Tally(tower.trained)
        tally.run(self.projector, self.count)
        return tower.flops(self.count) + tally.flops

    def measure(self, media: Media) -> Size:
        picture_size(media)
        return Size(self.count, cost=self.work)

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": self.processor(images=read_picture(media), return_tensors="pt")["pixel_values"][0]}

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(3, self.edge, self.edge)}

    def places(self, inputs: Inputs) -> int:
        return self.count

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        seen = self.tower(torch.stack([item["pixels"] for item in items]), return_dict=True).last_hidden_state
        projected: torch.Tensor = self.projector(seen).flatten(0, 1)
        return projected

    def preview(self, media: Media) -> str:
        return picture_html(media)


class PublishedCodes(Decoder):
    """Codes of the VQ part `vq` of a published model; `processor` is the family's own."""

    item_options = PICTURE_OPTIONS

    def __init__(self, model: PreTrainedModel, processor: Any, vq: str = "model.vqmodel") -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, where torch does not look: the model must not become its own part's child
        self.processor, self.vq_name = processor, vq

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def vq(self) -> Any:
        """Always in eval mode: some have norms that would learn from what they see."""
        return self.model.get_submodule(self.vq_name).eval()

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": self.processor(images=read_picture(media), return_tensors="pt")["pixel_values"][0]}

    def work(self, pixels: torch.Tensor) -> float:
        return forward_flops(self.model.get_submodule(self.vq_name), pixels, self.look_up)

    def look_up(self, vq: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Codes of one picture, in the shape that the family has them in."""
        codes: torch.Tensor = vq.encode(pixels[None]).image_tokens
        return codes

    @torch.no_grad()
    def draw(self, values: torch.Tensor) -> Any:
        """Values `[C, H, W]`, as the VQ part gives them, as a picture."""
        shown = self.processor.postprocess([values.float().cpu().numpy()], return_tensors="PIL.Image.Image")
        return shown["pixel_values"][0]

    def save(self, item: Any, stem: str) -> str:
        item.save(f"{stem}.png")
        return f"{stem}.png"

    def preview(self, media: Media) -> str:
        return picture_html(media)


class SquareCodes(PublishedCodes):
    """Janus: squares of one size in raster order; embedded and predicted by modules of their own."""

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        super().__init__(model, processor)
        self.edge: int = model.config.vision_config.image_size
        self.count: int = model.config.vq_config.num_patches**2

    def runs(self, what: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        return [self.model.model.generation_aligner if what == "embed" else self.model.model.generation_head]

    @cached_property
    def cost(self) -> float:
        return self.work(self.blank()["pixels"])

    def measure(self, media: Media) -> Size:
        picture_size(media)
        return Size(self.count, cost=self.cost)

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(3, self.edge, self.edge)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        vq = self.vq
        return torch.cat([self.look_up(vq, item["pixels"]).view(-1, 1) for item in items])

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.prepare_embeddings_for_image_generation(targets[:, 0])
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return code_loss(self.model.model.generation_head(hidden), targets[:, 0])

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        return None if len(targets) == self.count else sampling.draw(self.model.model.generation_head(hidden[None]))

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        return self.draw(self.vq.decode(targets.view(1, -1))[0])


class VocabularyCodes(PublishedCodes):
    """Codes that are tokens of the text: the model's own embedding and head are theirs, too. Squares of `edge` pixels,
    in raster order."""

    in_vocabulary = True

    def __init__(self, model: PreTrainedModel, processor: Any, edge: int) -> None:
        super().__init__(model, processor)
        self.edge = edge
        self.factor = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)  # pixels along the edge of a code

    def runs(self, what: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        return [self.model.get_output_embeddings()] if what == "loss" else []

    @property
    def own_ids(self) -> Sequence[int]:
        ids: list[int] = self.model.model.vocabulary_mapping.image_tokens
        return ids

    @cached_property
    def per_pixel(self) -> float:
        pixels = torch.zeros(3, 4 * self.factor, 4 * self.factor)
        return self.work(pixels) / pixels[0].numel()

    def measure(self, media: Media) -> Size:
        picture_size(media)
        return Size((self.edge // self.factor) ** 2, cost=self.edge**2 * self.per_pixel)

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(3, 2 * self.factor, 2 * self.factor)}  # norms do not take a single code

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        vq, table = self.vq, self.model.model.vocabulary_mapping.img2bpe_mapping_tensor
        ids = [self.written(table.to(codes.device).long()[codes]) for codes in self.codes_of(vq, items)]
        return torch.cat([picture.reshape(-1, 1) for picture in ids])

    def codes_of(self, vq: Any, items: Sequence[Inputs]) -> list[torch.Tensor]:
        return [self.look_up(vq, item["pixels"]) for item in items]

    def written(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids of a picture as the model reads them."""
        return ids

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(targets[:, 0])
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        own = type(head).forward  # not what somebody may have put in its place for the text
        if own is nn.Linear.forward:
            return linear_cross_entropy_sum(hidden, LinearHead(head.weight, head.bias), targets[:, 0])
        return code_loss(own(head, hidden), targets[:, 0])

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        raise UserError(
            f"{type(self.model).__name__} of this transformers has no way from codes to pictures: it can be trained on "
            "them, but not draw any"
        )


class LinedCodes(VocabularyCodes):
    """Emu3: pictures of any shape, their size written ahead of them, and a token at the end of each line.

    `min_pixels`, `max_pixels`: by default what the folder's preprocessor says; `draw`: height and width of what is
    drawn, in pixels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any,
        folder: str | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        draw: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model, processor, 0)
        processor.max_pixels = max_pixels or processor.max_pixels
        processor.min_pixels = min_pixels or min(processor.min_pixels, processor.max_pixels)
        if processor.min_pixels > processor.max_pixels:
            raise UserError(f"model.modalities: min_pixels {min_pixels} is above max_pixels {processor.max_pixels}")
        self.folder = folder
        edge = round(min(PUBLISHED_AREA, processor.max_pixels) ** 0.5 / self.factor)
        self.drawn = tuple(side // self.factor for side in draw) if draw else (edge, edge)

    def measure(self, media: Media) -> Size:
        height, width = picture_size(media)
        if max(height, width) > 200 * min(height, width):
            raise BadMedia(f"{media.name} is {width} x {height} pixels: one edge is more than 200 times the other")
        limits = (self.processor.min_pixels, self.processor.max_pixels)
        height, width = smart_resize(height, width, self.factor, *limits)
        lines, row = height // self.factor, width // self.factor
        places = lines * (row + 1)
        return Size(places, height * width * self.per_pixel, layout=(f"{lines}*{row}{SIZE_END}", places, FRAME_END))

    def look_up(self, vq: Any, pixels: torch.Tensor) -> torch.Tensor:
        codes: torch.Tensor = vq.encode(pixels[None], [pixels.shape[1:]]).image_tokens[0]
        return codes

    def written(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids, torch.full_like(ids[:, :1], self.end_of_line)], 1)

    @property
    def end_of_line(self) -> int:
        end: int = self.model.model.vocabulary_mapping.eol_token_id
        return end

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        lines, row = self.drawn
        if len(targets) == lines * (row + 1):
            return None
        if len(targets) % (row + 1) == row:
            return torch.tensor([self.end_of_line], device=hidden.device)
        ids = torch.tensor(self.own_ids, device=hidden.device)
        return ids[sampling.draw(self.model.get_output_embeddings()(hidden[None])[:, ids])]

    def generate(
        self, hidden: torch.Tensor, advance: Callable[[torch.Tensor], torch.Tensor], sampling: Sampling
    ) -> torch.Tensor:
        """Its size is written first, and the end of the frame last."""
        lines, row = self.drawn
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        for written in (f"{lines}*{row}{SIZE_END}", FRAME_END):
            ids = tokenizer(written, add_special_tokens=False, return_tensors="pt").input_ids[0].to(hidden.device)
            if written == FRAME_END:
                made = super().generate(hidden, advance, sampling)
            for embedding in self.embed(ids[:, None]):
                hidden = advance(embedding)
        return made

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        lines, row = self.drawn
        codes = self.model.model.vocabulary_mapping.convert_bpe2img(targets.view(1, lines, row + 1))
        return self.draw(self.vq.decode(codes)[0])


def enter_ids(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Ids of codes in the places of their placeholders: the model embeds them with the text."""
    ids = inputs["input_ids"]
    for arrived in features.values():
        placed = (torch.zeros_like(arrived.index), arrived.index)
        ids = ids.index_put(placed, arrived.values[:, 0].to(ids.dtype))
    return inputs | {"input_ids": ids}


def checked(build: Callable[..., Any], key: str, *args: Any, **options: Any) -> Any:
    """`build` with the config's `options`; one that it does not know is refused by its key."""
    try:
        signature(build).bind(*args, **options)
    except TypeError as error:
        raise UserError(f"{key}.options: {error}") from error
    return build(*args, **options)


def picture_processor(kind: Any, folder: str | None, **own: Any) -> Any:
    """As the folder says, else with the mean and deviation that these families are published with."""
    return preprocessor(kind, folder, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, **own)
