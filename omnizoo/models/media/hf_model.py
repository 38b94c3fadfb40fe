"""The media of an HF model, as its recipe describes them. `media_model` returns the media of any model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Decoder, Encoder, Follower, Modality, find_module
from omnizoo.modalities.item import Port
from omnizoo.models.diffusion.media import DenoiserMedia
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.hf_private import language_model
from omnizoo.models.media.batch import MediaBatch, exchange_media
from omnizoo.models.media.decoder_losses import DecoderLosses
from omnizoo.models.media.features import MediaFeatures, join_by_modality, placed_features
from omnizoo.models.media.followers import build_followers, capture_states, follower_losses
from omnizoo.models.media.media_model import MediaModel, MediaModule, MediaOutput, Positions, SpeakerFormat
from omnizoo.models.read_config import tokenizer_folder
from omnizoo.models.recipe import Recipe, recipe_for
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens

MEDIA_ATTRIBUTE = "_omnizoo_media"  # attribute of a model that stores its `HFMediaModel`, so modalities are built once


def media_model(model: nn.Module) -> MediaModel:
    """Return the media of `model`. A composed model describes its media itself; other models have a recipe."""
    if isinstance(model, MediaModel):
        return model
    recipe = denoiser_recipe(model)
    if recipe is not None:
        return DenoiserMedia(recipe)
    if MEDIA_ATTRIBUTE not in vars(model):
        setattr(model, MEDIA_ATTRIBUTE, HFMediaModel(model))
    media = vars(model)[MEDIA_ATTRIBUTE]
    assert isinstance(media, HFMediaModel)
    return media


class HFMediaModel(MediaModel):
    """The media of an HF model or a user module, as described by its recipe. Most of these models read text only."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.recipe = model, recipe_for(model)
        self.built: dict[str, Modality] | None = None
        self.forward: MultimodalForward | None = None  # `attach` sets it

    @property
    def media_modules(self) -> Sequence[MediaModule]:
        """The modules of the recipe that this model contains. Some model sizes lack some of the family's modules."""
        return [module for module in self.recipe.media_modules if _has_module(self.model, module)]

    @property
    def built_decoders(self) -> Mapping[Port, Decoder]:
        built = self.built or {}
        return {Port(name, "decoder"): modality.decoder for name, modality in built.items() if modality.decoder}

    @property
    def language(self) -> PreTrainedModel:
        language = self.model.get_submodule(self.recipe.language)
        assert isinstance(language, PreTrainedModel)
        return language

    @property
    def idle(self) -> Sequence[str]:
        return [name for name in self.recipe.idle if hasattr(self.model, name.partition(".")[0])]

    @property
    def positions(self) -> Positions | None:
        return partial(self.recipe.positions, self.language) if self.recipe.positions else None

    @property
    def bidirectional(self) -> BidirectionalTokens | None:
        return self.recipe.bidirectional(self.language) if self.recipe.bidirectional else None

    @property
    def speaker_format(self) -> SpeakerFormat | None:
        return self.recipe.speaker_format

    def modalities(self, spec: ModelSection) -> dict[str, Modality]:
        if self.recipe.modalities is None:
            return {}
        if self.built is None:
            options = {}
            for name, modality in spec.modalities.items():
                if modality.encoder:
                    options[name] = modality.encoder.options
                if modality.decoder:
                    options[str(Port(name, "decoder"))] = modality.decoder.options
            self.built = self.recipe.modalities(self.language, tokenizer_folder(spec), options)
            self.built |= build_followers(self.model, self.modules_of("follower"), spec)

        unknown = set(spec.modalities) - set(self.built)
        if unknown:
            raise UserError(
                f"model.modalities: {type(self.model).__name__} has no modality {min(unknown)!r}; "
                f"its modalities are {', '.join(self.built)}"
            )
        return self.built

    def embed(self, ids: torch.Tensor, media: MediaBatch) -> torch.Tensor:
        assert self.forward is not None, "`attach` comes first"
        inputs, _ = self.forward.merge_features({"input_ids": ids[None]}, media)
        embeddings: torch.Tensor = inputs["inputs_embeds"]
        return embeddings[0]

    def attach(self, spec: ModelSection) -> None:
        """Replace `forward` on this instance, not on its class. The new forward runs between FSDP's hooks."""
        model = self.model
        modalities = self.modalities(spec)
        if isinstance(model, PreTrainedModel) and (modalities or not _takes_logits_to_keep(model)):
            self.forward = MultimodalForward(model, self, self.recipe, modalities)
            model.forward = self.forward


class MultimodalForward:
    """Forward of an HF model that reads or generates media.

    Every encoder, decoder and follower runs exactly once per call.
    """

    def __init__(
        self, model: PreTrainedModel, media: MediaModel, recipe: Recipe, modalities: Mapping[str, Modality]
    ) -> None:
        self.recipe, self.language = recipe, media.language
        self.ports_by_call = media.ports_by_call
        modules = {port: find_module(modalities, port) for port in media.ports}
        self.encoders = {port: module for port, module in modules.items() if isinstance(module, Encoder)}
        self.decoders = {port: module for port, module in modules.items() if isinstance(module, Decoder)}
        self.followers = {port: module for port, module in modules.items() if isinstance(module, Follower)}
        self.original: Callable[..., Any] = model.forward
        self.takes_logits_to_keep = _takes_logits_to_keep(model)
        self.__wrapped__ = self.original  # transformers' `generate` reads the signature of the original

    def __call__(self, *args: Any, media: MediaBatch | None = None, logits_to_keep: Any = None, **inputs: Any) -> Any:
        if media is None:
            return self.call_original(*args, logits_to_keep=logits_to_keep, **inputs)
        merged, received = self.merge_features(inputs, media)
        decoder_losses = DecoderLosses(self.decoders, received, media.transport)
        followers = self.followers if media.transport.trains_followers else {}
        needs_likelihood = media.transport.needs_likelihood
        with decoder_losses.watching(self.language, needs_likelihood), capture_states(followers) as states:
            output = self.call_original(logits_to_keep=logits_to_keep, **merged)
        if not self.decoders and not followers:
            return output

        losses = decoder_losses.finish(output.logits)
        losses |= follower_losses(followers, states, inputs["input_ids"], media)
        return MediaOutput(
            logits=output.logits,
            losses=losses,
            past_key_values=output.get("past_key_values"),
            last_hidden_state=decoder_losses.hidden,
        )

    def merge_features(
        self, inputs: dict[str, Any], media: MediaBatch
    ) -> tuple[dict[str, Any], dict[Port, MediaFeatures]]:
        """Encode media, exchange the features between ranks, and insert them with the family's `merge_features`."""
        received = exchange_media(media, self.ports_by_call, self.encoders, self.decoders)
        placed = placed_features(received, self.decoders, media.dtype)
        assert self.recipe.merge_features is not None, "the recipe of a family that reads media sets `merge_features`"
        return self.recipe.merge_features(self.language, inputs, join_by_modality(placed)), received

    def call_original(self, *args: Any, logits_to_keep: Any = None, **inputs: Any) -> Any:
        """Call the model's original forward, with the hooks that its family needs."""
        with ExitStack() as stack:
            change = self.recipe.language_model_inputs
            if change is not None:

                def change_inputs(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                    return args, change(kwargs)

                module = language_model(self.language)
                stack.enter_context(module.register_forward_pre_hook(change_inputs, with_kwargs=True))

            if logits_to_keep is not None and self.takes_logits_to_keep:
                inputs["logits_to_keep"] = logits_to_keep
            elif logits_to_keep is not None:

                def keep_positions(_: nn.Module, args: Any) -> tuple[Any, ...]:
                    return (args[0][:, logits_to_keep], *args[1:])

                head = self.language.get_output_embeddings()
                stack.enter_context(head.register_forward_pre_hook(keep_positions))
            return self.original(*args, **inputs)


def _has_module(model: nn.Module, module: MediaModule) -> bool:
    """Whether the model contains `module`.

    Some sizes of a family lack an encoder, and some folders lack the follower.
    """
    parent, _, name = module.module.rpartition(".")
    return module.role == "decoder" or getattr(model.get_submodule(parent), name, None) is not None


def _takes_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in signature(type(model).forward).parameters
