"""Call a diffusion transformer: one convention for latents, time and conditions, for every family."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.expert_pair import EXPERTS, ExpertPair
from omnizoo.models.diffusion.latents import pack, unpack
from omnizoo.models.diffusion.recipe import CHANNELS, COMPRESSION, TEXT, DiffusionRecipe, ForwardShapes
from omnizoo.models.diffusion.split import NewExchange, SharedTokens, sharing

Conditions = Mapping[str, torch.Tensor]


def predict(
    model: nn.Module,
    recipe: DiffusionRecipe,
    noisy: torch.Tensor,
    noise_share: torch.Tensor,
    condition: Conditions,
    sequence: NewExchange | None = None,
) -> torch.Tensor:
    """Return the transformer's prediction for a batch of samples with one shape and one text length.

    Args:
        model: The transformer, or the pair of experts. It may be sharded.
        recipe: Its recipe (`denoiser_recipe`).
        noisy: Noisy latents `[B, C, F, H, W]` or `[B, C, H, W]`, normalized as the family's pipeline does. Their dtype
            is the dtype of the computation.
        noise_share: Share of noise in the latents, `[B]`, from 0 to 1. For discrete schedules, timestep / 1000.
        condition: Conditions of the recipe, with a batch dim. `text` has no padding if the recipe trims text.
        sequence: Returns the exchange between the ranks that share the batch, for the lengths of samples. All of these
            ranks pass the same batch. None: this rank processes the batch alone.

    Returns:
        The prediction, in the shape of `noisy` and complete on every rank: noise - data for flow models, and what the
        scheduler expects for others. If ranks share the batch, the gradients of all of them are summed, so each must
        divide its loss by their number.
    """
    if isinstance(model, ExpertPair):
        return _predict_by_experts(model, recipe, noisy, noise_share, condition, sequence)
    inputs = forward_inputs(model, recipe, noisy, noise_share, condition)
    with sharing(model, _shared_tokens(model, recipe, noisy, condition, sequence)):
        output = model(**inputs, return_dict=False)[0]
    return _prediction(model, recipe, noisy, output)


def _predict_by_experts(
    pair: ExpertPair,
    recipe: DiffusionRecipe,
    noisy: torch.Tensor,
    noise_share: torch.Tensor,
    condition: Conditions,
    sequence: NewExchange | None,
) -> torch.Tensor:
    """Return the predictions of the experts, each for the samples in its range of noise shares.

    An expert without a sample processes a single patch, because all ranks must run the same collectives.
    """
    is_first = noise_share >= pair.boundary
    batch: dict[str, tuple[torch.Tensor, torch.Tensor, Conditions]] = {}
    shared: dict[str, SharedTokens | None] = {}
    selected: dict[str, torch.Tensor] = {}
    for name, mask in zip(EXPERTS, (is_first, ~is_first), strict=True):
        expert = pair.get_submodule(name)
        samples = mask.nonzero()[:, 0]
        selected[name] = samples
        conditions = {key: tensor[samples] for key, tensor in condition.items()}
        batch[name] = noisy[samples], noise_share[samples], conditions
        shared[name] = _shared_tokens(expert, recipe, noisy, condition, sequence)
        if not len(samples):
            batch[name] = one_patch(expert, recipe, noisy, noise_share, condition)
            shared[name] = None

    inputs = {}
    for name, (latents, share, chosen) in batch.items():
        inputs[name] = forward_inputs(pair.get_submodule(name), recipe, latents, share, chosen)
    outputs = pair(inputs, shared)

    prediction = torch.zeros_like(noisy)
    for name, samples in selected.items():
        part = _prediction(pair.get_submodule(name), recipe, batch[name][0], outputs[name])
        is_used = len(samples) > 0
        prediction = prediction.index_put((samples,), part) if is_used else prediction + 0 * part.sum()
    return prediction


def one_patch(
    model: Any, recipe: DiffusionRecipe, noisy: torch.Tensor, noise_share: torch.Tensor, condition: Conditions
) -> tuple[torch.Tensor, torch.Tensor, Conditions]:
    """Return the first patch of the first sample of a batch, with its conditions."""
    depth, height, width = recipe.patch(model.config)
    frames = depth if noisy.dim() == 5 else None

    def crop(latents: torch.Tensor) -> torch.Tensor:
        cropped = latents[:1, ..., :height, :width]
        return cropped if frames is None else cropped[:, :, :frames]

    chosen = {}
    for name, tensor in condition.items():
        chosen[name] = crop(tensor) if recipe.conditions[name].argument == CHANNELS else tensor[:1]
    return crop(noisy), noise_share[:1], chosen


def forward_inputs(
    model: Any, recipe: DiffusionRecipe, noisy: torch.Tensor, noise_share: torch.Tensor, condition: Conditions
) -> dict[str, Any]:
    """Return the keyword arguments of the transformer's forward, for one batch."""
    config = model.config
    latents = _with_frames(noisy)
    grid = recipe.grid(config, latents.shape[1:])
    text_tokens = condition[TEXT].shape[1]
    required = recipe.fixed_text_tokens(config)
    if required not in (None, text_tokens):
        raise UserError(
            f"data.text_tokens: {text_tokens} is not possible, because the code of this model requires {required} text "
            "tokens. Remove the key."
        )
    scale = recipe.time_scale * (config[recipe.time_factor] if recipe.time_factor else 1.0)
    time = scale * (1 - noise_share if recipe.is_time_reversed else noise_share)
    inputs: dict[str, Any] = {recipe.time_argument: time.round() if recipe.is_time_discrete else time}

    for name, fact in recipe.conditions.items():
        value = condition.get(name)
        if value is None:
            continue
        value = value.to(noisy.dtype) * fact.scale if value.is_floating_point() else value
        if fact.argument == CHANNELS:
            latents = torch.cat([latents, _with_frames(value)], 1)
        else:
            inputs[fact.argument] = value

    if recipe.is_packed:
        latents = pack(latents, recipe.patch(config))
    elif recipe.dims == 2:
        latents = latents.squeeze(2)
    elif recipe.frames_first:
        latents = latents.transpose(1, 2)
    inputs[recipe.latents_argument] = latents
    if recipe.takes_lists:
        for argument in (recipe.latents_argument, recipe.conditions[TEXT].argument):
            inputs[argument] = list(inputs[argument].unbind())
    if recipe.arguments is not None:
        shapes = ForwardShapes(
            config=config,
            grid=grid,
            text_tokens=text_tokens,
            batch=noisy.shape[0],
            dtype=noisy.dtype,
            device=noisy.device,
            compression=vars(model).get(COMPRESSION),
        )
        inputs |= recipe.arguments(shapes)
    return inputs


def _prediction(model: Any, recipe: DiffusionRecipe, noisy: torch.Tensor, output: Any) -> torch.Tensor:
    """Return an output of the transformer in the shape and sign of the contract."""
    if recipe.takes_lists:
        output = torch.stack(output)
    if recipe.is_packed:
        grid = recipe.grid(model.config, noisy.shape[1:])
        output = unpack(output, grid, recipe.patch(model.config))
    elif recipe.dims == 2:
        output = output.unsqueeze(2)
    elif recipe.frames_first:
        output = output.transpose(1, 2)
    latents: torch.Tensor = output[:, : noisy.shape[1]]  # some models also predict a variance
    return recipe.output_sign * latents.reshape(noisy.shape)


def _shared_tokens(
    model: Any, recipe: DiffusionRecipe, noisy: torch.Tensor, condition: Conditions, sequence: NewExchange | None
) -> SharedTokens | None:
    """Return the slices of a batch that several ranks share; None if this rank processes it alone."""
    if sequence is None:
        return None
    assert recipe.split is not None, "checked when the model is parallelized"
    frames, height, width = recipe.grid(model.config, _with_frames(noisy).shape[1:])
    tokens = recipe.padded(frames * height * width)
    text_tokens = recipe.padded(condition[TEXT].shape[1])
    if recipe.split.joins_text:
        tokens += text_tokens
    cut_text_tokens = text_tokens if TEXT in recipe.split.streams else None
    return SharedTokens.of(sequence, tokens, cut_text_tokens, recipe.split.needs_text)


def _with_frames(latents: torch.Tensor) -> torch.Tensor:
    """Return latents `[B, C, F, H, W]`."""
    return latents if latents.dim() == 5 else latents.unsqueeze(2)
