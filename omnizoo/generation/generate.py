"""Generate text and media, one token or target at a time, with a KV cache, for one or several prompts.

After the begin token of a modality, its decoder generates the item and feeds each target back into the language model.
Text generation continues after the end token.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.generation.conversation import Conversation, ConversationBatch, JointSupport
from omnizoo.modalities.base import ItemDecoder, Modality, VocabularyDecoder
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.media.batch import prompt_batch
from omnizoo.models.media.media_model import MediaModel


@dataclass(frozen=True)
class GeneratedPiece:
    """A part of a response: the token ids of text, or the targets of a media item and the rendered item."""

    modality: str  # "text" or the name of a modality
    ids: list[int]  # token ids of text; empty for media
    targets: torch.Tensor | None = None  # [targets, values per target]; None for text
    item: Any = None  # the item that the decoder or follower renders from `targets`


OnPiece = Callable[[GeneratedPiece], None]


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with token ids and prepared media, ready for generation.

    Args:
        ids: Token ids of the prompt.
        items: Media items of the prompt, prepared for the encoders.
        sampling: Temperature, top-k, top-p and the generator of this prompt.
        on_piece: Called with a piece of the response whenever this piece grows.
    """

    ids: Sequence[int]
    items: Sequence[MediaItem]
    sampling: Sampling
    on_piece: OnPiece = lambda piece: None


@dataclass(eq=False)
class Response:
    """An unfinished response."""

    number: int  # number of the prompt
    prompt: PreparedPrompt
    conversation: Conversation
    pieces: list[GeneratedPiece] = field(default_factory=list)
    num_drawn: int = 0  # number of tokens sampled from the logits
    is_done: bool = False
    error: UserError | None = None

    def add_token(self, token: int) -> None:
        """Append a token to the last piece of text, or to a new one."""
        if not self.pieces or self.pieces[-1].modality != "text":
            self.pieces.append(GeneratedPiece("text", []))
        self.pieces[-1].ids.append(token)
        self.prompt.on_piece(self.pieces[-1])

    def add_item(self, piece: GeneratedPiece) -> None:
        """Append a generated media item."""
        self.pieces.append(piece)
        self.prompt.on_piece(piece)


# The pieces of the response to a prompt, or an error with the reason why there is no response.
Outcome = list[GeneratedPiece] | UserError


@dataclass(frozen=True)
class TokenRules:
    """Tokens with a special effect on a response, and the maximum length of a response."""

    begin: Mapping[int, Modality]  # tokens that begin a media item
    excluded: torch.Tensor  # token ids that are never sampled: placeholder tokens, and reserved ids of decoders
    stop: Collection[int]  # tokens that end the response
    max_tokens: int


@dataclass(frozen=True)
class GenerativeModel:
    """An unsharded model on one device, with its tokenizer and the modalities that it accepts and generates."""

    model: PreTrainedModel
    media: MediaModel
    tokenizer: Any
    modalities: Mapping[str, Modality]

    @torch.no_grad()
    def follow(
        self, ids: Sequence[int], items: Sequence[MediaItem], options: Mapping[str, Any], sampling: Sampling
    ) -> list[GeneratedPiece]:
        """Run each follower on a conversation that ends with the response, and return one piece per follower.

        Each follower processes the conversation in one forward pass, as in training.

        Args:
            ids: Token ids of the conversation.
            items: Media items of the conversation, prepared for the encoders.
            options: Options of the generated item, with the same keys as the options of a media item in a row.
            sampling: Temperature, top-k, top-p and generator.
        """
        pieces = []
        for module in self.media.modules_of("follower"):
            follower = self.modalities[module.modality].follower
            assert follower is not None
            with follower.capture() as hidden_states:
                Conversation(self.model, self.media).read(ids, items)
            rows = follower.rows_from(hidden_states, torch.tensor(ids, device=self.model.device))
            targets = follower.generate(rows, np.array(ids, np.int32), items, options, sampling)
            item = follower.render(targets, options)
            pieces.append(GeneratedPiece(module.modality, ids=[], targets=targets, item=item))
        return pieces

    @torch.no_grad()
    def generate(
        self,
        prompts: Iterable[PreparedPrompt | UserError],
        max_tokens: int,
        stop: Sequence[int],
        batch: int,
        support: JointSupport,
    ) -> Iterator[tuple[int, Outcome]]:
        """Generate the responses to prompts, each up to a `stop` token or `max_tokens` text tokens.

        A response depends neither on the other prompts nor on `batch`, except for rounding.

        Args:
            prompts: The prompts. A prompt that cannot be used is replaced by an error. Each prompt is read when its
                response is about to be generated.
            max_tokens: Maximum number of text tokens of a response. Placeholder tokens of generated items do not
                count, because decoders limit the length of items. A model that generates no text generates one item of
                at most this many placeholder tokens.
            stop: Tokens that end a response, in addition to the tokenizer's end-of-sequence token.
            batch: Maximum number of responses to generate at once.
            support: Whether the model can continue several responses in one forward pass.

        Yields:
            The number of a prompt and its response. Responses are yielded in the order in which they finish.
        """
        rules = TokenRules(
            begin=self._begin_tokens(),
            excluded=torch.tensor(self._excluded_ids(), dtype=torch.int64, device=self.model.device),
            stop={*stop, self.tokenizer.eos_token_id},
            max_tokens=max_tokens,
        )
        conversations = ConversationBatch(self.model, self.media, support)
        waiting = enumerate(prompts)
        unfinished: list[Response] = []
        while True:
            room = (1 if support.obstacle else batch) - len(unfinished)
            for number, prompt in islice(waiting, max(room, 0)):
                if isinstance(prompt, UserError):
                    yield number, prompt
                elif self.media.speaker_format is not None:
                    yield number, [self._generate_only_item(prompt, max_tokens)]
                else:
                    response = Response(number, prompt, Conversation(self.model, self.media))
                    response.conversation.read(prompt.ids, prompt.items)
                    unfinished.append(response)
            if not unfinished:
                return
            self._advance(unfinished, conversations, rules)
            for response in unfinished:
                if response.is_done:
                    yield response.number, response.error or response.pieces
            unfinished = [response for response in unfinished if not response.is_done]

    def _advance(self, responses: Sequence[Response], conversations: ConversationBatch, rules: TokenRules) -> None:
        """Sample one token for each response, and run the model on the tokens of the unfinished responses.

        A begin token starts the generation of a media item.
        """
        continued = []
        tokens = []
        for response, token in zip(responses, _draw(responses, rules.excluded), strict=True):
            response.num_drawn += 1
            is_last = response.num_drawn == rules.max_tokens
            if token is None or token in rules.stop:
                response.is_done = True
            elif token in rules.begin:
                conversations.separate([response.conversation])
                response.add_item(self._generate_item(response, rules.begin[token], token))
                response.is_done = is_last
            else:
                response.add_token(token)
                response.is_done = is_last
                if not is_last:
                    continued.append(response.conversation)
                    tokens.append(token)
        conversations.drop([response.conversation for response in responses if response.is_done])
        if continued:
            conversations.write(continued, tokens)

    def _begin_tokens(self) -> dict[int, Modality]:
        """Return the modalities that can be generated, by the id of their begin token."""
        by_token: dict[int, Modality] = {}
        for modality in self.modalities.values():
            if modality.decoder and modality.begin:
                by_token[self.tokenizer.convert_tokens_to_ids(modality.begin)] = modality
        return by_token

    def _excluded_ids(self) -> list[int]:
        """Return the token ids that are never sampled: placeholder tokens, and the reserved ids of decoders."""
        ids: list[int] = []
        for modality in self.modalities.values():
            if modality.placeholder:
                ids.append(self.tokenizer.convert_tokens_to_ids(modality.placeholder))
            if isinstance(modality.decoder, VocabularyDecoder):
                ids += modality.decoder.reserved_ids
        return ids

    def _generate_only_item(self, prompt: PreparedPrompt, max_placeholders: int) -> GeneratedPiece:
        """Generate the response of a model that generates no text: one item.

        Args:
            prompt: The prompt.
            max_placeholders: Maximum number of placeholder tokens of the item.
        """
        generated = [modality for modality in self.modalities.values() if modality.decoder is not None]
        modality = generated[0]
        decoder = modality.decoder
        assert isinstance(decoder, ItemDecoder), f"{type(decoder).__name__} has no `generate_item`"

        batch = prompt_batch(prompt.items, self.media.ports, self.model.device, self.model.dtype)
        embeddings = self.media.embed(torch.tensor(prompt.ids, device=self.model.device), batch)
        targets = decoder.generate_item(embeddings, max_placeholders, prompt.sampling)
        piece = GeneratedPiece(modality.name, ids=[], targets=targets, item=decoder.render(targets))
        prompt.on_piece(piece)
        return piece

    def _generate_item(self, response: Response, modality: Modality, begin: int) -> GeneratedPiece:
        """Generate a media item after its begin token, and append its end token to the conversation."""
        decoder = modality.decoder
        assert decoder is not None
        conversation = response.conversation
        targets = decoder.generate(conversation.write(begin), conversation.feed, response.prompt.sampling)
        if modality.end:
            conversation.write(self.tokenizer.convert_tokens_to_ids(modality.end))
        return GeneratedPiece(modality.name, ids=[], targets=targets, item=decoder.render(targets))


def _draw(responses: Sequence[Response], excluded: torch.Tensor) -> list[int | None]:
    """Sample the next token of each response from its logits, with the random generator of its prompt.

    If the logits are not finite, the token is None, and an error is stored in the response.
    """
    logits = torch.stack([response.conversation.logits for response in responses])
    is_finite = torch.isfinite(logits).all(-1).tolist()
    logits[:, excluded] = -torch.inf
    tokens: list[int | None] = []
    for i, response in enumerate(responses):
        if is_finite[i]:
            tokens.append(int(response.prompt.sampling.draw(logits[i : i + 1])[0]))
        else:
            reason = "the logits are not finite. The weights are damaged, or training diverged."
            response.error = UserError(f"model: {reason}")
            tokens.append(None)
    return tokens
