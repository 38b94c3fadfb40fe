"""A conversation in, the model's answer out: rows are read as in training, and the answer has the shape of a row's
content again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.entrance import keep_logits
from omnizoo.assembly.published import media_model
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.data.render import HERE, Renderer
from omnizoo.data.rows import BadRow, Folder
from omnizoo.modalities.base import Modality, Sampling
from omnizoo.modalities.item import BadMedia
from omnizoo.models.build import check_vocabulary, load_tokenizer
from omnizoo.models.generate import Piece, generate
from omnizoo.models.media_model import MediaModel
from omnizoo.models.weights import load_whole


@dataclass(frozen=True)
class Writer:
    """A trained model, whole, on one device, with what it takes to talk to it."""

    model: PreTrainedModel
    media: MediaModel
    tokenizer: Any
    renderer: Renderer
    modalities: Mapping[str, Modality]

    def write(
        self,
        messages: list[dict[str, Any]] | str,
        sampling: Sampling | None = None,
        max_tokens: int = 256,
        folder: Folder = HERE,
    ) -> list[Piece]:
        """The answer to `messages`; a string is one message of the user, or, without a chat template, a beginning.

        Paths of media in them are relative to `folder`.
        """
        try:
            prompt = self.renderer.prompt(messages, folder.find)
            items = [
                replace(item, inputs=item.port.module(self.modalities).prepare(item.media)) for item in prompt.items
            ]
        except (BadRow, BadMedia) as reason:
            raise UserError(f"the prompt cannot be used: {reason}") from None
        if not len(prompt.ids):
            raise UserError("the prompt is empty: there is nothing to go on from")
        ids, stop = prompt.ids.tolist(), self._end_of_turn()
        return generate(self.model, self.media, self.tokenizer, self.modalities, ids, items, max_tokens, sampling, stop)

    def text(self, pieces: Sequence[Piece]) -> str:
        """What was written, without special tokens; items as their names in brackets."""
        return "".join(self.decode(piece) if piece.modality == "text" else f"[{piece.modality}]" for piece in pieces)

    def decode(self, piece: Piece) -> str:
        """A piece of text as a reader wants it: special tokens are for the model."""
        return str(self.tokenizer.decode(piece.ids, skip_special_tokens=True))

    def _end_of_turn(self) -> list[int]:
        """Tokens that end an answer: the model's own, and the one the chat template puts there."""
        declared = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = declared if isinstance(declared, list) else [declared] if declared is not None else []
        return [*ends, *self.renderer.end_of_turn()]


def load_writer(
    folder: str | Path,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Writer:
    """The model of a Hugging Face folder (as `omnizoo export` writes it), ready to write.

    `allow_code`: modules that the folder may name as encoders and decoders; `trust_remote_code`: run code inside of it.
    """
    spec = Model(path=str(folder), allow_code=list(allow_code), trust_remote_code=trust_remote_code)
    model = load_whole(spec, dtype)
    nn.Module.to(model, device or torch.device("cpu"))
    tokenizer = load_tokenizer(spec)
    check_vocabulary(model, tokenizer)
    media = media_model(model)
    modalities = media.modalities(spec)
    media.attach(spec)
    keep_logits(model)
    return Writer(model.eval(), media, tokenizer, Renderer(tokenizer, False, modalities), modalities)
