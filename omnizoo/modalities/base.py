"""What a modality is: an `Encoder` brings items in, a `Decoder` lets the model produce them. Both are plain modules. A
`Follower` produces beside the sequence: it reads what the language model made of a conversation.

An item takes places in the sequence, but for those of followers. At each of them an encoder gives a feature, and a
decoder has a target. No class ever sees a rank, a pack or the foundation: which items a call gets, and where what it
gives goes, is decided elsewhere. `measure` and `prepare` run in loader workers, on a copy of the module that has no
weights; the rest runs on the device, inside the model's forward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from html import escape
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.modalities.frozen import Frozen
from omnizoo.modalities.item import Media

Ids = npt.NDArray[np.int32]
Inputs = dict[str, torch.Tensor]  # a prepared item: what `encode` or `targets` needs of it
Role = Literal["encoder", "decoder", "follower"]


class Inside(NamedTuple):
    """A run of places, among those of an item, that belong to an item inside of it: the sound of a clip."""

    modality: str
    places: int


@dataclass(frozen=True)
class Size:
    """What an item will take, known before it is decoded."""

    places: int  # in the sequence
    cost: float  # FLOPs of `encode`, with backward if it is trained, or of `targets`: ranks share items by it
    targets: int | None = None  # decoders: what the loss is a mean over; None: its places
    residual: int = 0  # the same of a second loss (`terms`), on what refines the first targets
    # Text between its places, e.g. ("<0.5 s>", 64, "<1.5 s>", 64); (): one run. Runs of items inside of it, too.
    layout: tuple[str | int | Inside, ...] = ()
    inside: Mapping[str, "Size"] = field(default_factory=dict)  # by modality: an item that is read off the same media
    shape: tuple[float, ...] = ()  # for models that place items on several axes: what they need to know for it


class Port(NamedTuple):
    """A module of the model that items go through: the encoder, decoder or follower of a modality."""

    modality: str
    role: Role

    def __str__(self) -> str:
        return "/".join(self)

    def module(self, modalities: Mapping[str, "Modality"]) -> "Encoder | Decoder | Follower":
        module: Encoder | Decoder | Follower | None = getattr(modalities[self.modality], self.role)
        assert module is not None, f"there is no {self}"
        return module


@dataclass(frozen=True)
class Item:
    """A media item and its places: of a sample, then of its pack, then of the micro-batch that the pack is dealt to."""

    port: Port  # the module it goes through
    size: Size
    spans: tuple[tuple[int, int], ...]  # (first token, how many) of each run of its places
    is_target: bool  # the model predicts it
    raw: Media | None = None  # as its row gives it; left behind once it is prepared
    inputs: Inputs | None = None  # once it is prepared, where it was prepared
    is_learnt: bool = True  # if predicted: by its decoder's loss. If not, only how likely it is counts, in an answer
    answer: int | None = None  # of a follower: which of the assistant's messages it is part of
    notes: Inputs = field(default_factory=dict)  # of a follower: what it wrote down of the conversation

    @property
    def media(self) -> Media:
        assert self.raw is not None, "asked of an item that was prepared already"
        return self.raw

    @property
    def targets(self) -> int:
        """What its loss is a mean over."""
        return (self.size.targets or self.size.places) if self.is_target and self.is_learnt else 0

    def cut(self, parts: Sequence[tuple[Size, Inputs]]) -> list["Item"]:
        """This item, prepared, as its parts, each in its own places; in every copy, where it is at several places."""
        tokens = np.concatenate([np.arange(first, first + count) for first, count in self.spans] or [np.zeros(0, int)])
        ends = np.cumsum([size.places for size, _ in parts])
        copies = tokens.reshape(-1, ends[-1])
        items = []
        for (size, inputs), places in zip(parts, np.split(copies, ends[:-1], axis=1), strict=True):
            own = places.reshape(-1)
            runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
            spans = tuple((int(run[0]), len(run)) for run in runs if len(run))
            items.append(replace(self, size=size, spans=spans, raw=None, inputs=inputs))
        return items

    def moved(self, by: int, **changes: Any) -> "Item":
        """The same item, among tokens of which `by` more come before it."""
        return replace(self, spans=tuple((first + by, count) for first, count in self.spans), **changes)


@dataclass(frozen=True)
class Sampling:
    """How the next token or target is drawn. Temperature 0 takes the most likely one."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """`[..., V]` -> `[...]`."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1.0:
            sorted_, order = logits.sort(descending=True)
            probability = sorted_.softmax(-1)
            beyond = probability.cumsum(-1) - probability > self.top_p  # the first one always stays
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        drawn = torch.multinomial(logits.softmax(-1).flatten(0, -2), 1, generator=self.generator)
        return drawn.view(logits.shape[:-1])


def term_name(modality: str, term: str) -> str:
    """How a loss of a modality is called in metrics."""
    return f"{modality}/{term}" if term else modality


class Encoder(nn.Module):
    """One modality in. Built as `Class(width, **options)`: the width is the foundation's, options are the config's."""

    item_options: ClassVar[Sequence[str] | None] = None  # of `Media.options`, those that it reads; None: any

    @property
    def pretrained(self) -> PreTrainedModel | None:
        """The part of it that published weights (`path` in the config) are for."""
        return None

    def measure(self, media: Media) -> Size:
        """From the header only. Raises `BadMedia` for what cannot be used."""
        raise NotImplementedError

    def prepare(self, media: Media) -> Inputs:
        """Decode and preprocess. Must not touch weights."""
        raise NotImplementedError

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """A prepared item as several, in order, where parts of it do not see each other: a long one would keep a rank
        busy while the others wait."""
        return [(size, inputs)]

    def blank(self) -> Inputs:
        """The smallest prepared item there is: encoded, and thrown away, where a rank has no item of its own."""
        raise NotImplementedError

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Features `[places of all items, width]`, in order. Float inputs come in the precision of the computation."""
        raise NotImplementedError

    def places(self, inputs: Inputs) -> int:
        """How many a prepared item takes, by the shapes of its tensors. Asked where modalities share one tower."""
        raise NotImplementedError

    def preview(self, media: Media) -> str:
        """A bit of HTML that shows the item to a person (`omnizoo data inspect`)."""
        return escape(media.name)


class Decoder(nn.Module):
    """One modality out, and in again: what it produced is fed back through `embed`."""

    item_options: ClassVar[Sequence[str] | None] = None  # of `Media.options`, those that it reads; None: any
    values: ClassVar[Sequence[str]] = ()  # keys of a content part, besides the modality's own, that give the item
    terms: Mapping[str, float] = MappingProxyType({"": 1.0})  # its losses, with weights: "" on targets, "residual"
    entering: ClassVar[Sequence[str]] = ()  # submodules that `embed` runs; `loss` runs the others. For counting FLOPs
    not_likely: ClassVar[str] = "its decoder has no `log_likelihood`"  # why it cannot be in answers that are compared
    # Targets `[n, 1]` are ids of the language model's own vocabulary: it embeds them itself, and `loss`, which uses its
    # head, is called where it runs that. `embed` is for generation.
    in_vocabulary: ClassVar[bool] = False
    uses_head: ClassVar[bool] = False  # its loss uses the language model's head, too, and is called where that runs

    @property
    def pretrained(self) -> PreTrainedModel | None:
        """The part of it that published weights (`path` in the config) are for."""
        return None

    def runs(self, what: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        """Modules that `embed` or `loss` runs once per target, without frozen ones. For counting FLOPs."""
        for name, module in self.named_children():
            if not isinstance(module, Frozen) and (name in self.entering) == (what == "embed"):
                yield module

    @property
    def own_ids(self) -> Sequence[int]:
        """Ids of the vocabulary that nobody but it writes."""
        return ()

    def measure(self, media: Media) -> Size:
        raise NotImplementedError

    def prepare(self, media: Media) -> Inputs:
        raise NotImplementedError

    def blank(self) -> Inputs:
        raise NotImplementedError

    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        """`[places of all items, K]`: what shall be predicted at each, integers or floats. Carries no gradient."""
        raise NotImplementedError

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        """`[N, K]` -> `[N, width]`: what the foundation sees in their places. N may be 0. Float targets come in the
        precision of the computation."""
        raise NotImplementedError

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of N targets: `hidden [N, width]` is the foundation's at the place before each. N may be 0.
        Float targets come in fp32 or better, whatever the precision of the computation."""
        raise NotImplementedError

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same by the names of `terms`, for a decoder with more than one loss."""
        return {"": self.loss(hidden, targets)}

    def log_likelihood(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Given the same as `loss`: how likely each target is, a logarithm, `[N]`; and how many values that is of,
        `[N]`, as `Size.targets` counts them. For losses that compare answers: a decoder may do without."""
        raise NotImplementedError

    @classmethod
    def has_likelihood(cls) -> bool:
        return cls.log_likelihood is not Decoder.log_likelihood

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        """The next target `[K]` after `targets [n, K]`, given the `hidden [width]` before it; None: the item ends."""
        raise NotImplementedError

    def render(self, targets: torch.Tensor) -> Any:
        """The item that `targets [n, K]` stand for, as a person would want it: a PIL image, an array, a waveform."""
        raise NotImplementedError

    def generate(
        self, hidden: torch.Tensor, advance: Callable[[torch.Tensor], torch.Tensor], sampling: Sampling
    ) -> torch.Tensor:
        """All targets of a new item. `advance` shows the foundation an embedding `[width]`, gives the next hidden."""
        made = self.targets([self.blank()])[:0]
        while (target := self.sample(hidden, made, sampling)) is not None:
            made = torch.cat([made, target[None].to(made.dtype)])
            hidden = advance(self.embed(made[-1:])[0])
        return made

    def speak(self, embeddings: torch.Tensor, most: int, sampling: Sampling) -> torch.Tensor:
        """All targets of a new item, `most` at most, after a prompt whose embeddings are `[T, width]`. For models that
        produce nothing but such items."""
        raise NotImplementedError

    def save(self, item: Any, stem: str) -> str:
        """Write what `render` gave to `stem` plus a fitting suffix; returns the file's name."""
        raise NotImplementedError

    def preview(self, media: Media) -> str:
        return escape(media.name)


class Follower(nn.Module):
    """One modality out, beside the sequence: a model of its own that reads what the language model makes of tokens
    (`spans` of its items: those it reads), and learns to say an answer in its own way.

    It is called once per forward pass on every rank, after the language model, on items from anywhere: what it reads
    is sent to it.
    """

    item_options: ClassVar[Sequence[str] | None] = None  # of `Media.options`, those that it reads; None: any
    values: ClassVar[Sequence[str]] = ()  # keys of a content part, besides the modality's own, that give the item
    terms: Mapping[str, float]  # its losses, with their weights: "" for that on targets, "residual"

    def read_with(self, tokenizer: Any) -> None:
        """Told before anything is read: for followers that look for tokens which no config names."""

    def measure(self, media: Media) -> Size:
        """Without its places, which `follow` finds."""
        raise NotImplementedError

    def prepare(self, media: Media) -> Inputs:
        raise NotImplementedError

    def follow(self, ids: Ids, items: Sequence["Item"], item: "Item", answers: int) -> "Item":
        """`item` with its place in a conversation of these token ids and items, in which the assistant says `answers`
        messages: the tokens it reads, its size, its notes. Raises `BadMedia`."""
        raise NotImplementedError

    def blank(self) -> Inputs:
        """The smallest prepared item with its notes."""
        raise NotImplementedError

    def rows(self, inputs: Inputs) -> int:
        """How many tokens a prepared item reads, by the shapes of its tensors."""
        raise NotImplementedError

    def reading(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Around a forward pass of the language model: afterwards there is what it made of each token, `[T, ...]`."""
        raise NotImplementedError

    def read(self, kept: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """`[T, C]`: of what `reading` kept of tokens with these ids `[T]`, a row for each."""
        raise NotImplementedError

    def loss(self, rows: torch.Tensor, items: Sequence[Inputs]) -> dict[str, torch.Tensor]:
        """Sums of its losses, by the names of `terms`, on items whose tokens have these rows `[N, C]`, in order."""
        raise NotImplementedError

    def generate(
        self, states: torch.Tensor, ids: Ids, items: Sequence["Item"], options: Mapping[str, Any], sampling: Sampling
    ) -> torch.Tensor:
        """Targets `[n, K]` of a new item: the last answer of a conversation. `states [T, C]` is what `read` gives of
        its tokens, `ids [T]`; `options` are those of a row's item."""
        raise NotImplementedError

    def render(self, targets: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """What targets of `generate`, with the same options, stand for: see `Decoder.render`."""
        raise NotImplementedError

    def save(self, item: Any, stem: str) -> str:
        raise NotImplementedError

    def preview(self, media: Media) -> str:
        return escape(media.name)


@dataclass(frozen=True)
class Modality:
    """A content type of rows: how an item is written among tokens, and which modules read and produce it.

    `begin`, `placeholder` and `end` are special tokens of the tokenizer; begin and end may be empty, and all of them
    where there is a follower only. `marks` are further ones, in the text that `Size.layout` has among the places. The
    modules are copies without weights: for `measure` and `prepare`.
    """

    name: str
    encoder: Encoder | None
    decoder: Decoder | None
    begin: str
    placeholder: str
    end: str
    marks: tuple[str, ...] = ()
    # How the published template writes an item into a message; {number} counts from 1, {before} from 0.
    in_chat: str = "{item}"
    follower: Follower | None = None
    last: str = ""  # what stands in an item's last place, if not the placeholder
