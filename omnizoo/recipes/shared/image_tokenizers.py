"""Decoders for images as codes. The model's own, frozen VQ model converts images to codes and back.

Such a decoder has no weights, but calls the model that it was built for. The VQ model processes one image at a time,
because rounding could change a code if images were processed in a batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.emu3.image_processing_emu3 import smart_resize

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import CustomFlops, Decoder, VocabularyDecoder
from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.files.decoding import IMAGE_OPTIONS
from omnizoo.modalities.files.image import check_aspect, image_size, read_image
from omnizoo.modalities.files.preview import thumbnail
from omnizoo.modalities.frozen_tokenizer import forward_flops
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.media.features import Features
from omnizoo.recipes.shared.decoders import head_loss
from omnizoo.recipes.shared.encoders import UsesModel
from omnizoo.recipes.shared.image_encoders import TileEncoder

SIZE_END, FRAME_END = "<|image token|>", "<|extra_201|>"  # tokens before and after the image codes in Emu3
PUBLISHED_AREA = 720 * 720  # number of pixels of the images that Emu3 generates by default


class SquareImageEncoder(TileEncoder):
    """Encoder for images that are resized to the fixed size of the tower."""

    def __init__(self, model: PreTrainedModel, processor: Any, tower: str, projector: str) -> None:
        vision: Any = model.get_submodule(tower).config
        vision._attn_implementation = "sdpa"  # images form a batch, so packed attention is not needed
        patches = (vision.image_size // vision.patch_size) ** 2
        super().__init__(
            model,
            tower,
            projector,
            processor=processor,
            edge=vision.image_size,
            patches=patches,
            placeholders=patches,
        )

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.projector(self.tower(pixels, return_dict=True).last_hidden_state)
        return features


class ImageCodesDecoder(UsesModel, CustomFlops, Decoder):
    """Base class of decoders for codes of a VQ model.

    Args:
        processor: Image processor of the model family.
    """

    item_options = IMAGE_OPTIONS

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        super().__init__(model)
        self.processor = processor

    @property
    def vq(self) -> Any:
        """The VQ model, always in eval mode, because the norms of some VQ models would update their statistics."""
        return self.model.model.vqmodel.eval()

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": self.processor(images=read_image(media), return_tensors="pt")["pixel_values"][0]}

    def work(self, pixels: torch.Tensor) -> float:
        """Return the FLOPs of the VQ model for one image."""
        return forward_flops(self.vq, pixels, self.look_up)

    def look_up(self, vq: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the codes of one image, in the shape that the family uses."""
        codes: torch.Tensor = vq.encode(pixels[None]).image_tokens
        return codes

    @torch.no_grad()
    def to_pil(self, values: torch.Tensor) -> Any:
        """Convert the output of the VQ model, `[channels, height, width]`, to a PIL image."""
        images = self.processor.postprocess([values.float().cpu().numpy()], return_tensors="PIL.Image.Image")
        return images["pixel_values"][0]

    def save(self, item: Any, stem: str) -> str:
        item.save(f"{stem}.png")
        return f"{stem}.png"

    def preview(self, media: Media) -> str:
        return thumbnail(read_image(media), media.name)


class SquareCodes(ImageCodesDecoder):
    """Decoder of Janus: square images of one size in raster order, with separate modules for embedding and head."""

    def __init__(self, model: PreTrainedModel, processor: Any) -> None:
        super().__init__(model, processor)
        self.edge: int = model.config.vision_config.image_size
        self.count: int = model.config.vq_config.num_patches**2

    def modules_run_by(self, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        inner_model = self.model.model
        return [inner_model.generation_aligner if method == "embed" else inner_model.generation_head]

    @cached_property
    def cost(self) -> float:
        """FLOPs of the VQ model for an image."""
        return self.work(self.dummy_input()["pixels"])

    def measure(self, media: Media) -> MediaSize:
        image_size(media)
        return MediaSize(self.count, cost=self.cost)

    def dummy_input(self) -> Inputs:
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
        return self.to_pil(self.vq.decode(targets.view(1, -1))[0])


class VocabularyCodes(VocabularyDecoder, ImageCodesDecoder):
    """Decoder for codes that are tokens of the vocabulary, with the model's embedding and head.

    Images are squares of `edge` pixels, in raster order.
    """

    def __init__(self, model: PreTrainedModel, processor: Any, edge: int) -> None:
        super().__init__(model, processor)
        self.edge = edge
        self.factor = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)  # pixels per side of a code

    def modules_run_by(self, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        return [self.model.get_output_embeddings()] if method == "loss" else []

    @property
    def reserved_ids(self) -> Sequence[int]:
        ids: list[int] = self.model.model.vocabulary_mapping.image_tokens
        return ids

    @cached_property
    def per_pixel(self) -> float:
        """FLOPs of the VQ model per pixel."""
        pixels = torch.zeros(3, 4 * self.factor, 4 * self.factor)
        return self.work(pixels) / pixels[0].numel()

    def measure(self, media: Media) -> MediaSize:
        image_size(media)
        return MediaSize((self.edge // self.factor) ** 2, cost=self.edge**2 * self.per_pixel)

    def dummy_input(self) -> Inputs:
        return {"pixels": torch.zeros(3, 2 * self.factor, 2 * self.factor)}  # norms fail for a single code

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        vq = self.vq
        table = self.model.model.vocabulary_mapping.img2bpe_mapping_tensor
        targets = []
        for item in items:
            codes = self.look_up(vq, item["pixels"])
            ids = table.to(codes.device).long()[codes]
            targets.append(self.arrange(ids).reshape(-1, 1))
        return torch.cat(targets)

    def arrange(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids of an image in the layout that the model expects."""
        return ids

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(targets[:, 0])
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head_loss(self.model.get_output_embeddings(), hidden, targets[:, 0])

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        raise UserError(
            f"model: {type(self.model).__name__} of transformers cannot convert codes to images. "
            "Training works, but images cannot be generated."
        )


class LineCodes(VocabularyCodes):
    """Decoder of Emu3: images of any shape, preceded by their size as text, with a token at the end of each line.

    Args:
        min_pixels: Minimum number of pixels. If None, the setting of the folder's preprocessor is used.
        max_pixels: Maximum number of pixels. If None, the setting of the folder's preprocessor is used.
        draw: Height and width of generated images, in pixels.
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
            raise UserError(
                f"model.modalities: min_pixels {processor.min_pixels} is greater than max_pixels {processor.max_pixels}"
            )
        self.folder = folder
        default_side = round(min(PUBLISHED_AREA, processor.max_pixels) ** 0.5 / self.factor)
        default_grid = (default_side, default_side)
        # (lines, columns) of the codes of a generated image
        self.generated_grid = tuple(side // self.factor for side in draw) if draw else default_grid

    def measure(self, media: Media) -> MediaSize:
        height, width = image_size(media)
        check_aspect(media, height, width)
        height, width = smart_resize(height, width, self.factor, self.processor.min_pixels, self.processor.max_pixels)
        lines = height // self.factor
        columns = width // self.factor
        placeholders = lines * (columns + 1)
        layout = (f"{lines}*{columns}{SIZE_END}", placeholders, FRAME_END)
        return MediaSize(placeholders, height * width * self.per_pixel, layout=layout)

    def look_up(self, vq: Any, pixels: torch.Tensor) -> torch.Tensor:
        codes: torch.Tensor = vq.encode(pixels[None], [pixels.shape[1:]]).image_tokens[0]
        return codes

    def arrange(self, ids: torch.Tensor) -> torch.Tensor:
        line_ends = torch.full_like(ids[:, :1], self.end_of_line)
        return torch.cat([ids, line_ends], 1)

    @property
    def end_of_line(self) -> int:
        """Id of the token at the end of each line of codes."""
        return int(self.model.model.vocabulary_mapping.eol_token_id)

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        lines, columns = self.generated_grid
        if len(targets) == lines * (columns + 1):
            return None
        if len(targets) % (columns + 1) == columns:
            return torch.tensor([self.end_of_line], device=hidden.device)
        ids = torch.tensor(self.reserved_ids, device=hidden.device)
        logits = self.model.get_output_embeddings()(hidden[None])[:, ids]
        return ids[sampling.draw(logits)]

    def generate(
        self, hidden: torch.Tensor, advance: Callable[[torch.Tensor], torch.Tensor], sampling: Sampling
    ) -> torch.Tensor:
        """Feed the tokens for the size of an image, generate its codes, and feed the token that ends the frame."""
        lines, columns = self.generated_grid
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)

        def advance_over(text: str, state: torch.Tensor) -> torch.Tensor:
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0].to(state.device)
            for embedding in self.embed(ids[:, None]):
                state = advance(embedding)
            return state

        hidden = advance_over(f"{lines}*{columns}{SIZE_END}", hidden)
        targets = super().generate(hidden, advance, sampling)
        advance_over(FRAME_END, hidden)
        return targets

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        lines, columns = self.generated_grid
        codes = self.model.model.vocabulary_mapping.convert_bpe2img(targets.view(1, lines, columns + 1))
        return self.to_pil(self.vq.decode(codes)[0])


def merge_token_ids(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Replace placeholder tokens with the token ids of codes. The model embeds them along with the text."""
    ids = inputs["input_ids"]
    for media_features in features.values():
        index = (torch.zeros_like(media_features.index), media_features.index)
        ids = ids.index_put(index, media_features.values[:, 0].to(ids.dtype))
    return inputs | {"input_ids": ids}
