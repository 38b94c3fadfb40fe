"""Generate responses to chat messages. Messages are rendered as in training, and a response is a list of pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import DEFAULT_THINKING, HERE, Renderer
from omnizoo.data.rendering.thinking import Thinking
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.generation.generate import GeneratedPiece, GenerativeModel, OnPiece
from omnizoo.modalities.base import find_module
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import check_vocabulary
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.models.weights.load import load_whole


@dataclass(frozen=True)
class ChatModel(GenerativeModel):
    """A trained, unsharded model on one device that responds to chat messages."""

    renderer: Renderer

    def write(
        self,
        messages: list[dict[str, Any]] | str,
        sampling: Sampling | None = None,
        max_tokens: int = 256,
        folder: MediaFolder = HERE,
        followed: Mapping[str, Any] | None = None,
    ) -> list[GeneratedPiece]:
        """Generate the response to `messages`.

        Args:
            messages: Chat messages. A string is a single user message, or, if the tokenizer has no chat template, text
                to continue.
            sampling: Temperature, top-k, top-p and generator. Default: temperature 1, no top-k or top-p.
            max_tokens: Maximum number of generated text tokens.
            folder: Folder that media paths in `messages` are relative to.
            followed: Options for followers, which generate beside the text, such as `{"speaker": "ethan"}` for a
                talker. If None, followers do not run.

        Returns:
            The pieces of the response: text, media items, and the output of the followers.

        Raises:
            UserError: If the prompt is empty, or its messages or media cannot be used.
        """
        try:
            prompt = self.renderer.prompt(messages, folder.find)
        except (BadRow, BadMedia) as reason:
            raise UserError(f"prompt: {reason}") from None
        return self.answer(prompt, sampling, max_tokens, followed=followed)

    def answer(
        self,
        prompt: RenderedRow,
        sampling: Sampling | None = None,
        max_tokens: int = 256,
        on_piece: OnPiece = lambda piece: None,
        followed: Mapping[str, Any] | None = None,
    ) -> list[GeneratedPiece]:
        """Generate the response to a rendered prompt.

        Args:
            prompt: Prompt from the renderer.
            sampling: See `write`.
            max_tokens: See `write`.
            on_piece: Called with a piece whenever it grows.
            followed: See `write`.

        Returns:
            The pieces of the response (see `write`).

        Raises:
            UserError: If the prompt is empty or its media cannot be used.
        """
        try:
            items = [
                replace(item, inputs=find_module(self.modalities, item.port).prepare(item.media))
                for item in prompt.items
            ]
        except BadMedia as reason:
            raise UserError(f"prompt: {reason}") from None
        if not len(prompt):
            raise UserError("prompt: empty. Pass at least one token.")

        sampling = sampling or Sampling()
        ids = prompt.input_ids.tolist()
        pieces = self.generate(ids, items, max_tokens, sampling, self._end_of_turn(), on_piece)
        response = [token for piece in pieces for token in piece.ids]
        if followed is None or not response:
            return pieces

        follower_pieces = self.follow([*ids, *response], items, followed, sampling)
        for piece in follower_pieces:
            on_piece(piece)
        return pieces + follower_pieces

    def save(self, piece: GeneratedPiece, stem: Path) -> str:
        """Write a generated media item to a file whose path starts with `stem`, and return the path."""
        modality = self.modalities[piece.modality]
        decoder = modality.decoder or modality.follower
        assert decoder is not None
        stem.parent.mkdir(parents=True, exist_ok=True)
        return decoder.save(piece.item, str(stem))

    def text(self, pieces: Sequence[GeneratedPiece]) -> str:
        """Return the generated text without special tokens. A media item appears as its modality in brackets."""
        texts = [self.decode(piece) if piece.modality == "text" else f"[{piece.modality}]" for piece in pieces]
        return "".join(texts)

    def has_same_media(self, pieces: Sequence[GeneratedPiece], expected: Sequence[MediaItem]) -> bool:
        """Whether a response contains exactly the expected media items, compared by their targets.

        Args:
            pieces: The pieces of the response.
            expected: The expected items of decoders, in order.
        """
        generated = [piece for piece in pieces if piece.modality in self.modalities and self._decodes(piece.modality)]
        if [piece.modality for piece in generated] != [item.port.modality for item in expected]:
            return False
        return all(self._has_same_targets(piece, item) for piece, item in zip(generated, expected, strict=True))

    def _decodes(self, modality: str) -> bool:
        """Whether a decoder generates the modality."""
        return self.modalities[modality].decoder is not None

    @torch.no_grad()
    def _has_same_targets(self, piece: GeneratedPiece, item: MediaItem) -> bool:
        """Whether a generated item has the targets of an expected item. Floats may differ by rounding."""
        decoder = self.modalities[piece.modality].decoder
        assert decoder is not None
        assert piece.targets is not None
        inputs = {name: tensor.to(self.model.device) for name, tensor in decoder.prepare(item.media).items()}
        expected = decoder.targets([inputs]).to(piece.targets)
        return expected.shape == piece.targets.shape and torch.allclose(expected, piece.targets)

    def decode(self, piece: GeneratedPiece) -> str:
        """Return the text of a piece, without special tokens."""
        return str(self.tokenizer.decode(piece.ids, skip_special_tokens=True))

    def _end_of_turn(self) -> list[int]:
        """Return the tokens that end a response, from the generation config and the chat template."""
        generation_config = getattr(self.model, "generation_config", None)
        declared = getattr(generation_config, "eos_token_id", None)
        if declared is None:
            return list(self.renderer.end_of_turn())
        end_ids = declared if isinstance(declared, list) else [declared]
        return [*end_ids, *self.renderer.end_of_turn()]


def load_chat_model(
    folder: str | Path,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> ChatModel:
    """Load a chat model from a Hugging Face folder, such as one that `omnizoo export` wrote.

    Args:
        folder: Folder with config, weights and tokenizer.
        device: Device of the model. Default: CPU.
        dtype: Dtype of the weights.
        allow_code: Python modules that the folder may name as encoders and decoders.
        trust_remote_code: Whether to run Python code from the folder.

    Returns:
        The model in evaluation mode, with its tokenizer and renderer.
    """
    spec = ModelSection(path=str(folder), allow_code=list(allow_code), trust_remote_code=trust_remote_code)
    model = load_whole(spec, dtype)
    nn.Module.to(model, device or torch.device("cpu"))
    return chat_model_from(model, spec, load_tokenizer(spec))


def chat_model_from(
    model: PreTrainedModel, spec: ModelSection, tokenizer: Any, thinking: Thinking = DEFAULT_THINKING
) -> ChatModel:
    """Build a chat model from an unsharded transformers model whose weights are loaded.

    Args:
        model: The model.
        spec: The section `model` of the config.
        tokenizer: The tokenizer, with its chat template.
        thinking: Treatment of the reasoning of assistant messages.
    """
    check_vocabulary(model, tokenizer)
    media = media_model(model)
    modalities = media.modalities(spec)
    media.attach(spec)
    renderer = Renderer(tokenizer, False, modalities, ignore=["*"], turns=media.speaker_format, thinking=thinking)
    return ChatModel(model.eval(), media, tokenizer, modalities, renderer)
