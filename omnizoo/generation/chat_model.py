"""Generate responses to chat messages.

Messages are rendered as in training. A response is a list of pieces: text, media items and the output of followers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.checkpoint.merge_adapter import load_merged
from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import DEFAULT_THINKING, HERE, Renderer
from omnizoo.data.rendering.thinking import Thinking
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.generation.conversation import JointSupport
from omnizoo.generation.generate import GeneratedPiece, GenerativeModel, OnPiece, Outcome, PreparedPrompt
from omnizoo.generation.model_folder import FolderOptions, model_section
from omnizoo.modalities.base import find_module
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.build import check_vocabulary
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.model_inputs import unread_inputs
from omnizoo.models.read_config import load_tokenizer
from omnizoo.models.weights.load import load_whole

BATCH = 8  # default number of responses that are generated at once


@dataclass(frozen=True)
class Request:
    """A rendered prompt to respond to.

    Args:
        prompt: Prompt from the renderer.
        sampling: Temperature, top-k, top-p, and a generator that no other request uses.
        on_piece: Called with a piece of the response whenever this piece grows.
    """

    prompt: RenderedRow
    sampling: Sampling
    on_piece: OnPiece = lambda piece: None


@dataclass(frozen=True)
class ChatModel(GenerativeModel):
    """A trained, unsharded model on one device that responds to chat messages."""

    renderer: Renderer
    support: JointSupport = field(default_factory=JointSupport)  # whether several responses can be generated at once

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
            followed: Options for followers, such as `{"speaker": "ethan"}` for a talker. Followers generate output in
                addition to the text. If None, followers do not run.

        Returns:
            The pieces of the response: text, media items, and the output of the followers.

        Raises:
            UserError: If the prompt is empty, or its messages or media cannot be used.
        """
        return self.answer(self.prompt(messages, folder), sampling, max_tokens, followed=followed)

    def write_all(
        self,
        conversations: Sequence[list[dict[str, Any]] | str],
        sampling: Sampling | None = None,
        max_tokens: int = 256,
        folder: MediaFolder = HERE,
        seed: int = 0,
        batch: int = BATCH,
    ) -> list[list[GeneratedPiece]]:
        """Generate the responses to several conversations, `batch` of them at once.

        Each response has its own random generator. It does not depend on the other conversations.

        Args:
            conversations: The messages of each conversation (see `write`).
            sampling: Temperature, top-k and top-p. Its generator is not used.
            max_tokens: See `write`.
            folder: See `write`.
            seed: Seed of the random generator of each response.
            batch: Maximum number of responses to generate at once.

        Returns:
            The pieces of each response.

        Raises:
            UserError: If a prompt is empty, or its messages or media cannot be used.
        """
        settings = sampling or Sampling()
        prompts = [self.prompt(messages, folder) for messages in conversations]
        requests = [Request(prompt, replace(settings, generator=self.seeded(seed))) for prompt in prompts]
        responses: dict[int, list[GeneratedPiece]] = {}
        for number, outcome in self.answers(requests, max_tokens, batch):
            if isinstance(outcome, UserError):
                raise outcome
            responses[number] = outcome
        return [responses[number] for number in range(len(prompts))]

    def prompt(self, messages: list[dict[str, Any]] | str, folder: MediaFolder = HERE) -> RenderedRow:
        """Render messages as a prompt.

        Args:
            messages: See `write`.
            folder: Folder that media paths in `messages` are relative to.

        Raises:
            UserError: If the messages or their media cannot be used.
        """
        try:
            return self.renderer.prompt(messages, folder.find)
        except (BadRow, BadMedia) as reason:
            raise UserError(f"prompt: {reason}{self.recipe_hint()}") from None

    def seeded(self, seed: int) -> torch.Generator:
        """Return a new random generator with this seed, on the device of the model."""
        return torch.Generator(self.model.device).manual_seed(seed)

    def recipe_hint(self) -> str:
        """Return a hint for a model that reads media but has no recipe; empty for all other models."""
        inputs = [] if self.media.ports else unread_inputs(self.model)
        if not inputs:
            return ""
        family = type(self.model).__name__
        return f" {family} reads {', '.join(inputs)}, but has no recipe. Name one with --recipe (recipe= in Python)."

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
            on_piece: Called with a piece of the response whenever this piece grows.
            followed: See `write`.

        Returns:
            The pieces of the response (see `write`).

        Raises:
            UserError: If the prompt is empty or its media cannot be used.
        """
        request = Request(prompt, sampling or Sampling(), on_piece)
        ((_, outcome),) = self.answers([request], max_tokens, batch=1, followed=followed)
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    def answers(
        self,
        requests: Iterable[Request],
        max_tokens: int = 256,
        batch: int = BATCH,
        followed: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, Outcome]]:
        """Generate the responses to rendered prompts, `batch` of them at once.

        Args:
            requests: The prompts. Each of them is read when its response is about to be generated.
            max_tokens: See `write`.
            batch: Maximum number of responses to generate at once. Followers process one response at a time.
            followed: See `write`.

        Yields:
            The number of a prompt, and the pieces of its response, or an error if there is no response. Responses are
            yielded in the order in which they finish.
        """
        prepared: dict[int, PreparedPrompt] = {}

        def prepare_all() -> Iterator[PreparedPrompt | UserError]:
            for number, request in enumerate(requests):
                try:
                    prepared[number] = self._prepare(request)
                except UserError as reason:
                    yield reason
                else:
                    yield prepared[number]

        for number, outcome in self.generate(prepare_all(), max_tokens, self._end_of_turn(), batch, self.support):
            prompt = prepared.pop(number, None)
            if followed is not None and prompt is not None and not isinstance(outcome, UserError):
                outcome = outcome + self._follow(prompt, outcome, followed)
            yield number, outcome

    def _prepare(self, request: Request) -> PreparedPrompt:
        """Decode the media of a prompt. Raises `UserError` if the prompt is empty or a media item cannot be used."""
        if not len(request.prompt):
            raise UserError("prompt: empty. Pass at least one token.")
        try:
            items = [
                replace(item, inputs=find_module(self.modalities, item.port).prepare(item.media))
                for item in request.prompt.items
            ]
        except BadMedia as reason:
            raise UserError(f"prompt: {reason}") from None
        return PreparedPrompt(request.prompt.input_ids.tolist(), items, request.sampling, request.on_piece)

    def _follow(
        self, prompt: PreparedPrompt, pieces: Sequence[GeneratedPiece], followed: Mapping[str, Any]
    ) -> list[GeneratedPiece]:
        """Run the followers on a prompt and the text of its response, and return their output."""
        response = [token for piece in pieces for token in piece.ids]
        if not response:
            return []
        follower_pieces = self.follow([*prompt.ids, *response], prompt.items, followed, prompt.sampling)
        for piece in follower_pieces:
            prompt.on_piece(piece)
        return follower_pieces

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
            expected: The expected items that decoders generate, in order.
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
        """Return the ids of tokens that end a response, from the generation config and the chat template."""
        generation_config = getattr(self.model, "generation_config", None)
        eos_ids = getattr(generation_config, "eos_token_id", None)
        if eos_ids is None:
            return list(self.renderer.end_of_turn())
        end_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
        return [*end_ids, *self.renderer.end_of_turn()]


def load_chat_model(
    folder: str | Path,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
    recipe: str | None = None,
    base: str | None = None,
) -> ChatModel:
    """Load a chat model.

    Args:
        folder: A Hugging Face folder, such as one that `omnizoo export` wrote; the folder of a PEFT adapter; or a run
            folder or checkpoint. An adapter is merged into its base model. A checkpoint is exported temporarily.
        device: Device of the model. Default: CPU.
        dtype: Dtype of the weights.
        allow_code: Python modules that the folder may import code from.
        trust_remote_code: Whether to run Python code from the folder.
        recipe: `package.module:RECIPE` for a model family without a built-in recipe. Default: the recipe of the run.
        base: Folder of the base model of an adapter. Default: the folder that the adapter names.

    Returns:
        The model in evaluation mode, with its tokenizer and renderer.

    Raises:
        UserError: If the folder contains no model, cannot be used, or names code that is not allowed.
    """
    with model_section(Path(folder), FolderOptions(allow_code, trust_remote_code, recipe, base)) as spec:
        return chat_model_of(spec, device, dtype)


def chat_model_of(spec: ModelSection, device: torch.device | None, dtype: torch.dtype = torch.float32) -> ChatModel:
    """Load the chat model that `spec` describes: a Hugging Face folder, with or without an adapter to merge."""
    model = load_whole(spec, dtype) if spec.adapter is None else load_merged(spec, dtype)
    nn.Module.to(model, device or torch.device("cpu"))
    return chat_model_from(model, spec, load_tokenizer(spec))


def chat_model_from(
    model: PreTrainedModel,
    spec: ModelSection,
    tokenizer: Any,
    thinking: Thinking = DEFAULT_THINKING,
    support: JointSupport | None = None,
) -> ChatModel:
    """Build a chat model from an unsharded transformers model whose weights are loaded.

    Args:
        model: The model.
        spec: The section `model` of the config.
        tokenizer: The tokenizer, with its chat template.
        thinking: How the reasoning in assistant messages is rendered.
        support: The `support` of an earlier chat model with the same architecture, so it is checked only once.

    Raises:
        UserError: If the tokenizer has more tokens than the model.
    """
    check_vocabulary(model, tokenizer)
    media = media_model(model)
    modalities = media.modalities(spec)
    media.attach(spec)
    renderer = Renderer(tokenizer, False, modalities, ignore=["*"], turns=media.speaker_format, thinking=thinking)
    return ChatModel(model.eval(), media, tokenizer, modalities, renderer, support or JointSupport())
