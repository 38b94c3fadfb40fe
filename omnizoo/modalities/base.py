"""Contracts of a modality: `Encoder`, `Decoder` and `Follower`, all of which are plain modules.

An `Encoder` turns media items into features. A `Decoder` lets the model generate items within the token sequence. A
`Follower` generates items beside the token sequence, from hidden states of the language model.

The items of encoders and decoders have placeholder tokens in the sequence. For each placeholder token, an encoder
provides a feature and a decoder a target. No class depends on ranks, packs or the foundation. `measure` and `prepare`
run in loader workers, on a copy of the module without weights. All other methods run on the device, during the forward
pass of the model.

A decoder only needs the methods of `Decoder`. Mixins add capabilities: `LikelihoodDecoder`, `MultiLossDecoder`,
`HeadDecoder`, `VocabularyDecoder`, `ItemDecoder`, `CustomFlops`. For encoders, there is `SharedTower`.

In shapes, N is the number of targets in a call, n the number of targets of one item, and K the number of values per
target.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.modalities.item import Ids, Inputs, MediaItem, MediaSize, Port
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling


def term_name(modality: str, term: str) -> str:
    """Return the name of a modality's loss term in metrics."""
    return f"{modality}/{term}" if term else modality


class ItemModule(nn.Module):
    """Base class of encoders, decoders and followers, with the methods that measure and prepare items."""

    # Keys of a content part that the module reads. If None, every key is allowed.
    item_options: ClassVar[Sequence[str] | None] = None
    values: ClassVar[Sequence[str]] = ()  # additional keys of a content part that may contain the item

    def measure(self, media: Media) -> MediaSize:
        """Measure an item from its header, without decoding it.

        Args:
            media: The item as its row contains it.

        Returns:
            The number of placeholder tokens, the cost and the number of targets.

        Raises:
            BadMedia: If the item cannot be used.
        """
        raise NotImplementedError

    def prepare(self, media: Media) -> Inputs:
        """Decode and preprocess an item. Runs in a loader worker, so it must not use weights.

        Args:
            media: The item as its row contains it.

        Returns:
            The tensors that `encode` or `targets` needs, keyed by name.

        Raises:
            BadMedia: If the item cannot be used.
        """
        raise NotImplementedError

    def dummy_input(self) -> Inputs:
        """Return the smallest prepared item. Ranks without an item process it and discard the result."""
        raise NotImplementedError

    @property
    def pretrained(self) -> PreTrainedModel | None:
        """The Hugging Face model inside this module that loads the weights in `path`; None if there is none."""
        return None

    def preview(self, media: Media) -> str:
        """Return HTML that displays the item (`omnizoo data inspect`)."""
        return escape(media.name)


class Encoder(ItemModule):
    """Base class of modules that bring one modality into the model.

    An encoder is built as `Class(width, **options)`, with the width of the foundation and the options of the config.
    The features of an item must not depend on the other items of a call.
    """

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Return the features of the items.

        Args:
            items: Prepared items, on the device. Float tensors have the precision of the computation.

        Returns:
            Features `[placeholder tokens of all items, width]`, in the order of the items.
        """
        raise NotImplementedError

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        """Split a prepared item, in order, into parts that do not attend to each other.

        Parts may be assigned to different ranks, so that a long item does not keep one rank busy while other ranks
        wait.

        Args:
            size: The size of the item, from `measure`.
            inputs: The prepared item.

        Returns:
            The size and the tensors of each part. By default, the item is not split.
        """
        return [(size, inputs)]


class SharedTower:
    """Mixin for encoders of several modalities that share one call of a tower."""

    def count_placeholders(self, inputs: Inputs) -> int:
        """Return the number of placeholder tokens of a prepared item, from the shapes of its tensors."""
        raise NotImplementedError


class Decoder(ItemModule):
    """Base class of modules that let the model generate one modality.

    `embed` converts targets to input embeddings, so that the foundation can attend to the item.
    """

    no_likelihood_reason: ClassVar[str] = "its decoder has no `log_likelihood`"  # if it is no `LikelihoodDecoder`

    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Return the prediction targets of the items.

        Args:
            items: Prepared items, on the device.

        Returns:
            Targets `[placeholder tokens of all items, K]`, with K integers or floats per target, without gradient.
        """
        raise NotImplementedError

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the input embeddings of the foundation for the targets.

        Args:
            targets: `[N, K]`; N may be 0. Float targets have the precision of the computation.

        Returns:
            Embeddings `[N, width]`.
        """
        raise NotImplementedError

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each target, or their sum. Metrics by data source need the loss of each target.

        Args:
            hidden: `[N, width]`, hidden states of the tokens before the targets; N may be 0.
            targets: `[N, K]`. Float targets are fp32 or wider, regardless of the precision of the computation.

        Returns:
            The losses `[N]`, or their sum, a scalar that is 0 if there are no targets.
        """
        raise NotImplementedError

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        """Sample the next target of an item.

        Args:
            hidden: `[width]`, hidden state of the token before the next target.
            targets: `[n, K]`, the targets of the item so far.
            sampling: Temperature, top-k and top-p.

        Returns:
            The next target `[K]`, or None at the end of the item.
        """
        raise NotImplementedError

    def render(self, targets: torch.Tensor) -> Any:
        """Convert the targets `[n, K]` of an item to a PIL image, a waveform or an array."""
        raise NotImplementedError

    def save(self, item: Any, stem: str) -> str:
        """Write a rendered item to a file.

        Args:
            item: The item, from `render`.
            stem: Path of the file without its suffix.

        Returns:
            The name of the file: `stem` plus a suffix.
        """
        raise NotImplementedError

    def generate(
        self, hidden: torch.Tensor, advance: Callable[[torch.Tensor], torch.Tensor], sampling: Sampling
    ) -> torch.Tensor:
        """Generate all targets of a new item.

        Args:
            hidden: `[width]`, hidden state of the token before the item.
            advance: Feeds an embedding `[width]` to the foundation and returns the next hidden state `[width]`.
            sampling: Temperature, top-k and top-p.

        Returns:
            Targets `[n, K]`.
        """
        targets = self.targets([self.dummy_input()])[:0]
        while (target := self.sample(hidden, targets, sampling)) is not None:
            targets = torch.cat([targets, target[None].to(targets.dtype)])
            hidden = advance(self.embed(targets[-1:])[0])
        return targets


class LikelihoodDecoder:
    """Mixin for decoders whose items are allowed in the responses of preference data."""

    def log_likelihood(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-likelihood of each target.

        Args:
            hidden: `[N, width]`, as in `Decoder.loss`.
            targets: `[N, K]`, as in `Decoder.loss`.

        Returns:
            The log-likelihood `[N]` of each target, and the number of values in each target `[N]`, counted as in
            `MediaSize.targets`.
        """
        raise NotImplementedError


class MultiLossDecoder:
    """Mixin for decoders with more than one loss term. `losses` is called instead of `loss`."""

    term_weights: Mapping[str, float]  # keyed by term: "" for the loss on targets, "residual"

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the losses of each loss term in `term_weights`.

        The arguments and each result are the same as for `Decoder.loss`.
        """
        raise NotImplementedError


class HeadDecoder:
    """Mixin for decoders whose loss uses the head of the language model.

    The loss is computed while FSDP has gathered the weights of the head.
    """


class VocabularyDecoder(HeadDecoder):
    """Mixin for decoders whose targets `[N, 1]` are token ids.

    The language model embeds these ids. `embed` is called during generation only.
    """

    @property
    def reserved_ids(self) -> Sequence[int]:
        """Token ids that only this decoder generates."""
        raise NotImplementedError


class ItemDecoder:
    """Mixin for decoders of models that generate items only and no text, such as speech models."""

    def generate_item(self, embeddings: torch.Tensor, max_targets: int, sampling: Sampling) -> torch.Tensor:
        """Generate the targets of a new item.

        Args:
            embeddings: `[tokens, width]`, embeddings of the prompt.
            max_targets: Maximum number of targets.
            sampling: Temperature, top-k and top-p.

        Returns:
            Targets `[n, K]`.
        """
        raise NotImplementedError


class CustomFlops:
    """Mixin for decoders in which `loss` does not run each trained submodule exactly once per target."""

    def modules_run_by(self, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        """Return the trained modules that a method runs once per target.

        Args:
            method: `embed` or `loss`.

        Returns:
            The modules that are not frozen.
        """
        raise NotImplementedError


class Follower(ItemModule):
    """Base class of modules that generate one modality beside the token sequence, such as talkers.

    A follower reads the language model's hidden states at the `spans` of its items. A talker, for example, learns to
    speak a response. All ranks call the follower once per forward pass, after the language model. The hidden states are
    sent to the rank that processes the item.

    `measure` does not count placeholder tokens; `locate_item` finds the tokens to read. `dummy_input` also returns the
    tensors of `MediaItem.notes`.
    """

    term_weights: Mapping[str, float]  # keyed by term: "" for the loss on targets, "residual"

    def read_with(self, tokenizer: Any) -> None:
        """Store token ids that the follower needs and that no config contains. Called before any row is read."""

    def locate_item(self, ids: Ids, items: Sequence["MediaItem"], item: "MediaItem", answers: int) -> "MediaItem":
        """Return `item` with its size, its notes and the spans of tokens that the follower reads for it.

        Args:
            ids: Token ids of the conversation.
            items: Media items of the conversation.
            item: The item of this follower.
            answers: Number of assistant messages in the conversation.

        Raises:
            BadMedia: If the item cannot be used.
        """
        raise NotImplementedError

    def rows(self, inputs: Inputs) -> int:
        """Return the number of tokens that the follower reads for a prepared item, from the shapes of its tensors."""
        raise NotImplementedError

    def capture(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Return a context manager that collects token states `[tokens, ...]` while the language model runs."""
        raise NotImplementedError

    def rows_from(self, states: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Return rows `[tokens, row width]` from the states that `capture` collected for the tokens `ids [tokens]`."""
        raise NotImplementedError

    def loss(self, rows: torch.Tensor, items: Sequence[Inputs]) -> dict[str, torch.Tensor]:
        """Return the losses of each loss term in `term_weights`: one sum for each item, `[items]`, or one scalar.

        Metrics by data source need one sum for each item.

        `rows [N, row width]` contains the rows of the tokens of all items, in order.
        """
        raise NotImplementedError

    def generate(
        self,
        states: torch.Tensor,
        ids: Ids,
        items: Sequence["MediaItem"],
        options: Mapping[str, Any],
        sampling: Sampling,
    ) -> torch.Tensor:
        """Generate the targets `[n, K]` of the last response of a conversation.

        Args:
            states: `[tokens, row width]`, the result of `rows_from` for the tokens of the conversation.
            ids: `[tokens]`, token ids of the conversation.
            items: Media items of the conversation.
            options: Options of the new item, as a row sets them.
            sampling: Temperature, top-k and top-p.
        """
        raise NotImplementedError

    def render(self, targets: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """Convert targets to an item, like `Decoder.render`. The targets were generated with the same `options`."""
        raise NotImplementedError

    def save(self, item: Any, stem: str) -> str:
        """Write a rendered item to a file and return the name of the file, like `Decoder.save`."""
        raise NotImplementedError


def losses_by_term(decoder: Decoder, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the losses of a decoder, keyed by term. Without `MultiLossDecoder`, "" is the only term."""
    if isinstance(decoder, MultiLossDecoder):
        return decoder.losses(hidden, targets)
    return {"": decoder.loss(hidden, targets)}


def weights_by_term(module: Decoder | Follower) -> Mapping[str, float]:
    """Return the weight of each loss term."""
    return module.term_weights if isinstance(module, MultiLossDecoder | Follower) else {"": 1.0}


@dataclass(frozen=True)
class Modality:
    """A kind of media in rows: the tokens that enclose an item, and the modules that read and generate it.

    `begin`, `placeholder` and `end` are special tokens of the tokenizer. `begin` and `end` may be empty. All three are
    empty if there is only a follower. `marks` are special tokens in the text of `MediaSize.layout`. The modules are
    copies without weights, for `measure` and `prepare`.
    """

    name: str
    encoder: Encoder | None
    decoder: Decoder | None
    begin: str
    placeholder: str
    end: str
    marks: tuple[str, ...] = ()
    # Format of an item in a message, as in the published chat template; {number} counts items from 1, {before} from 0.
    in_chat: str = "{item}"
    follower: Follower | None = None
    last: str = ""  # last token of an item, if it is not the placeholder


def find_module(modalities: Mapping[str, Modality], port: Port) -> Encoder | Decoder | Follower:
    """Return the module of a port. The module must exist."""
    module: Encoder | Decoder | Follower | None = getattr(modalities[port.modality], port.role)
    assert module is not None, f"{port}: the modality has no such module"
    return module
