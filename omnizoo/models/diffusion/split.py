"""Sequence parallelism of a diffusion transformer, from outside: hooks cut its tokens and make them whole again.

Each rank runs the model on a slice of the tokens. Attention over cut tokens is replaced by a function that
communicates: a function mode inside the named attention modules catches `scaled_dot_product_attention`, so the code of
the model is unchanged. Every other attention must be named as local: if one was forgotten, each rank would attend to
its slice only, and the loss would change by very little.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.recipe import LATENTS, TEXT, Cut, Split
from omnizoo.ops.attention.packed import Pattern
from omnizoo.ops.compiled_blocks import graph_break

SPLIT = "_omnizoo_split"  # attribute of a model that stores its `SplitModel`
ATTENTION_CLASS = re.compile(r"Attention|Attn")


class TokenExchange(Protocol):
    """The ranks that share a sequence. `parallel.sequence.SequenceParallel` implements it."""

    @property
    def rank(self) -> int:
        """Index of this rank."""

    @property
    def tokens(self) -> Sequence[int]:
        """Number of tokens of each rank."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern
    ) -> torch.Tensor: ...

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor: ...


NewExchange = Callable[[Sequence[int]], TokenExchange]  # lengths of samples -> exchange


@dataclass(frozen=True)
class SharedTokens:
    """The slices of one batch. All samples of the batch have the same number of tokens."""

    counts: Mapping[str, Sequence[int]]  # stream -> number of tokens of each rank
    has_extra_text: bool  # whether this rank holds a copy of a text token, which takes no part in attention
    exchanges: Mapping[frozenset[str], TokenExchange]  # by the streams that attend to each other

    @classmethod
    def of(cls, new_exchange: NewExchange, latents: int, text: int | None, needs_text: bool) -> "SharedTokens":
        """Assign tokens to ranks. `text` is the number of text tokens, or None if text is not cut.

        If `needs_text`, a rank without text tokens holds a copy of the first one.

        The ranks hold equal numbers of tokens of the latents, and also of latents and text together, up to one token.
        Attention over all tokens does not depend on their order, so each rank holds one contiguous slice per stream.
        """
        exchange = new_exchange([latents])
        counts = {LATENTS: list(exchange.tokens)}
        exchanges = {frozenset([LATENTS]): exchange}
        if text is not None:
            joint = new_exchange([latents + text])
            counts[TEXT] = [total - part for total, part in zip(joint.tokens, exchange.tokens, strict=True)]
            exchanges[frozenset(counts)] = joint
        has_extra_text = needs_text and text is not None and not counts[TEXT][exchange.rank]
        return cls(counts=counts, exchanges=exchanges, has_extra_text=has_extra_text)

    @property
    def rank(self) -> int:
        """The index of this rank among those that share the tokens."""
        return self.exchanges[frozenset([LATENTS])].rank

    def cut(self, tensor: Any, cut: Cut, place: str) -> Any:
        """Return this rank's slice of a tensor, or of each tensor of a tuple. None stays None."""
        if tensor is None:
            return None
        if isinstance(tensor, tuple):
            return tuple(self.cut(part, cut, place) for part in tensor)
        if cut.stream == TEXT and self.has_extra_text:
            return tensor.narrow(cut.dim, 0, 1)
        counts = self.counts[cut.stream]
        assert tensor.shape[cut.dim] == sum(counts), f"{place}: {tuple(tensor.shape)}, {cut}, {counts}"
        starts = [0, *accumulate(counts)]
        return tensor.narrow(cut.dim, starts[self.rank], counts[self.rank])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all tokens of the latents from slices `[B, local tokens, width]`."""
        counts = self.counts[LATENTS]
        exchange = self.exchanges[frozenset([LATENTS])]
        return exchange.gather_rows(tensor.transpose(0, 1).contiguous(), counts).transpose(0, 1)


class SplitModel:
    """The sequence parallelism of one transformer. `shared` is set during a forward pass and kept for recomputation."""

    def __init__(self, model: nn.Module, split: Split, trims_text: bool) -> None:
        self.shared: SharedTokens | None = None
        self.trims_text = trims_text
        modules = dict(model.named_modules())
        check_attention_names(modules, split)
        for pattern, streams in split.attention.items():
            for name in _matching(modules, [pattern]):
                module: Any = modules[name]
                module.forward = DistributedAttention(name, module.forward, frozenset(streams), self)
        for pattern, cuts in split.inputs.items():
            for name in _matching(modules, [pattern]):
                hook = _input_hook(self, modules[name], name, cuts)
                modules[name].register_forward_pre_hook(hook, with_kwargs=True)
        for pattern, outputs in split.outputs.items():
            for name in _matching(modules, [pattern]):
                modules[name].register_forward_hook(_output_hook(self, name, outputs))
        for name in _matching(modules, [split.gathered]):
            modules[name].register_forward_hook(self._gather)

    def _gather(self, _: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if self.shared is None else self.shared.gather(output)


def check_attention_names(modules: Mapping[str, nn.Module], split: Split) -> None:
    """Check that the recipe names every attention module of the model."""
    named = {*_matching(modules, split.attention), *_matching(modules, split.local_attention)}
    for name, module in modules.items():
        if is_attention(module) and name not in named:
            raise UserError(
                f"parallel: the recipe of {type(modules['']).__name__} does not name the attention module {name} "
                f"({type(module).__name__}), so ranks cannot share its tokens. Add it to `split` of the recipe, or use "
                "parallel.ulysses: 1 and parallel.ring: 1."
            )


def is_attention(module: nn.Module) -> bool:
    """Whether a module computes attention, as its processor or the name of its class says."""
    has_processor = hasattr(module, "processor") and hasattr(module, "set_processor")
    return has_processor or (ATTENTION_CLASS.search(type(module).__name__) is not None and hasattr(module, "to_q"))


def _matching(names: Collection[str], patterns: Collection[str]) -> list[str]:
    """Return the module names that one of the patterns matches. `*` stands for one part of a name."""
    matched = []
    for name in names:
        for pattern in patterns:
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                matched.append(name)
                break
    return matched


def _input_hook(state: SplitModel, module: nn.Module, name: str, cuts: Mapping[str, Cut]) -> Any:
    """Return a hook that cuts arguments of a module, by keyword or by their position in its forward."""
    names = list(signature(type(module).forward).parameters)[1:]

    def cut_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = state.shared
        if shared is None:
            return None
        positional = list(args)
        keywords = dict(kwargs)
        for argument, cut in cuts.items():
            index = names.index(argument)
            if argument in keywords:
                keywords[argument] = shared.cut(keywords[argument], cut, f"{name}.{argument}")
            elif index < len(positional):
                positional[index] = shared.cut(positional[index], cut, f"{name}.{argument}")
        return tuple(positional), keywords

    return cut_inputs


def _output_hook(state: SplitModel, name: str, cuts: Sequence[Cut]) -> Any:
    """Return a hook that cuts the outputs of a module."""

    def cut_outputs(_: nn.Module, args: Any, output: Any) -> Any:
        shared = state.shared
        if shared is None:
            return None
        if isinstance(output, torch.Tensor):
            return shared.cut(output, cuts[0], name)
        return tuple(shared.cut(tensor, cut, name) for tensor, cut in zip(output, cuts, strict=True))

    return cut_outputs


class DistributedAttention:
    """Forward of an attention module whose tokens are cut. It replaces the forward of the module."""

    def __init__(self, name: str, forward: Callable[..., Any], streams: frozenset[str], state: SplitModel) -> None:
        self.name = name
        self.forward = forward
        self.streams = streams
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.shared is None:
            return self.forward(*args, **kwargs)
        return self._distributed(*args, **kwargs)

    @graph_break
    def _distributed(self, *args: Any, **kwargs: Any) -> Any:
        shared = self.state.shared
        assert shared is not None
        local_tokens = sum(shared.counts[stream][shared.rank] for stream in self.streams)
        mode = _ExchangeMode(
            exchange=shared.exchanges[self.streams],
            local_tokens=local_tokens,
            name=self.name,
            ignores_mask=self.state.trims_text,
            has_extra_token=shared.has_extra_text and TEXT in self.streams,
        )
        with mode:
            out = self.forward(*args, **kwargs)
        if mode.num_calls != 1:
            raise UserError(
                f"parallel: {self.name} computes attention {mode.num_calls} times with torch's "
                "scaled_dot_product_attention, and sequence parallelism needs exactly one call. Unset "
                "DIFFUSERS_ATTN_BACKEND, or use parallel.ulysses: 1 and parallel.ring: 1."
            )
        return out


class _ExchangeMode(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by attention over the tokens of all ranks."""

    def __init__(
        self, exchange: TokenExchange, local_tokens: int, name: str, ignores_mask: bool, has_extra_token: bool
    ) -> None:
        super().__init__()
        self.has_extra_token = has_extra_token
        self.ignores_mask = ignores_mask
        self.exchange = exchange
        self.local_tokens = local_tokens
        self.name = name
        self.num_calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return self.attend(*args, **(kwargs or {}))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute attention `[B, heads, tokens, width]`, one sample at a time.

        If text is trimmed to its mask, every token of a sample is visible, so a mask is ignored.
        """
        if self.has_extra_token:  # the last token, because the models that need one join latents and text
            query, key, value = query[:, :, :-1], key[:, :, :-1], value[:, :, :-1]
        tokens = {query.shape[2], key.shape[2], value.shape[2]}
        has_mask = attn_mask is not None and not self.ignores_mask
        if tokens != {self.local_tokens} or is_causal or dropout_p or has_mask:
            raise UserError(
                f"parallel: {self.name} attends from {query.shape[2]} to {key.shape[2]} tokens (causal: {is_causal}, "
                f"dropout: {dropout_p}, mask: {has_mask}); sequence parallelism supports only attention between all "
                f"{self.local_tokens} tokens of this rank without mask and dropout."
            )
        pattern = Pattern(causal=False, scale=scale)
        samples = []
        for sample in range(query.shape[0]):
            q, k, v = (x[sample : sample + 1] for x in (query, key, value))
            samples.append(self.exchange(q, k, v, pattern).transpose(1, 2))
        out = torch.cat(samples)
        return F.pad(out, (0, 0, 0, 1)) if self.has_extra_token else out


def split_tokens(model: nn.Module, split: Split, trims_text: bool) -> None:
    """Install the hooks and attention functions on a transformer. Must be called before it is sharded."""
    vars(model)[SPLIT] = SplitModel(model, split, trims_text)


@contextmanager
def sharing(model: nn.Module, shared: SharedTokens | None) -> Iterator[None]:
    """Context manager for a forward pass in which several ranks share the tokens; with None, the model runs alone."""
    state = vars(model).get(SPLIT)
    if state is None:
        assert shared is None, "`split_tokens` must be called before the model is sharded"
    else:
        state.shared = shared
    yield
