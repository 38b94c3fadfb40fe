"""Shard a model on meta according to its recipe and the mesh, and fill its weights.

The order is fixed: experts, tiling, compile, recompute, shard, weights. The model's code is not changed.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.diffusion.denoiser import split_denoiser
from omnizoo.models.hf_private import PACKED, attention_name, expert_modules, language_model
from omnizoo.models.interfaces.experts import use_dispatched
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.media_model import MediaModel
from omnizoo.models.recipe import ModelFacts, read_facts
from omnizoo.models.weights.load import weight_origins
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.experts import Dispatch, check_experts
from omnizoo.parallel.fsdp.fill import move
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.sequence.ulysses import check_heads
from omnizoo.parallelize.compile import compile_blocks, kinds_for
from omnizoo.parallelize.memory import check_memory
from omnizoo.parallelize.recompute import recompute_blocks
from omnizoo.parallelize.shard_units import shard_units
from omnizoo.parallelize.tiles import compute_in_tiles
from omnizoo.parallelize.weights import fill_weights, shard_device


def parallelize_model(
    model: nn.Module, mesh: Mesh, config: Config, load: bool = True, done: Callable[[str], None] = lambda _: None
) -> None:
    """Apply expert parallelism, recomputation and FSDP2/HSDP to `model`, then fill its weights.

    Each rank holds only its local shards and one full tensor at a time. Collective: all ranks must call it.

    Args:
        model: The model, on meta. It is modified in place.
        mesh: The mesh of ranks.
        config: The config of the run. Weights come from `model.path`, from random initialization, or from rank 0's
            Python object (`model.given`).
        load: Whether to fill the weights. If False, they stay undefined until a checkpoint is loaded; buffers that
            checkpoints do not contain are computed anyway.
        done: Called with the name of each phase when it ends: "shard", then "weights".

    Raises:
        UserError: If the model does not support the layout, does not fit in memory, or its weights cannot be loaded.
    """
    facts = read_facts(model)
    check(facts, mesh.layout, model)
    components = ComponentSettings(model, config.model, config.optimizer.groups)
    components.apply(model)
    components.keep_precision(model)
    check_memory(model, mesh, config)
    media = media_model(model)
    origins = weight_origins(model, media, config.model)
    if mesh.layout.sp > 1:
        split_denoiser(model)
    recomputation = Recomputation()
    dispatch_experts(model, facts, media, mesh, recomputation)

    kinds = kinds_for(mesh.device) if config.train.compile else None
    tile_tokens = config.parallel.tile_tokens
    if tile_tokens is not None:
        compute_in_tiles(model, facts, mesh, tile_tokens, config.train.precision, recomputation, kinds)
    # Recomputation wraps the compiled blocks, because a graph with breaks cannot contain it. FSDP2 wraps
    # both and gathers the weights.
    if kinds is not None:
        compile_blocks(model, facts, kinds)
    recompute_blocks(model, facts, components, mesh, config, recomputation)
    shard_units(model, facts, media, mesh, config, recomputation)
    done("shard")

    fill_weights(model, origins, mesh, config, load)
    media.attach(config.model)
    move(model, mesh.device, of_shards=shard_device(mesh, config))
    done("weights")


def dispatch_experts(
    model: nn.Module, facts: ModelFacts, media: MediaModel, mesh: Mesh, recomputation: Recomputation
) -> None:
    """Make the model compute its experts with `dispatched` (models/interfaces/experts.py).

    If `ep` is larger than 1, tokens are sent to the ranks that hold their experts.
    """
    if not facts.experts:
        return
    assert isinstance(model, PreTrainedModel)
    use_dispatched(language_model(model))
    for follower in media.modules_of("follower"):
        for module in model.get_submodule(follower.module).modules():
            if isinstance(module, PreTrainedModel) and expert_modules(module):
                use_dispatched(module)
    if mesh.layout.ep == 1:
        return
    for name in facts.experts:
        experts: Any = model.get_submodule(name)
        experts.dispatch = Dispatch(mesh.group("ep"), experts.num_experts, recomputation)


def check(facts: ModelFacts, layout: Layout, model: nn.Module) -> None:
    """Check that the model supports the layout, before any memory is allocated."""
    if layout.sp > 1:
        if attention_name(model) != PACKED:
            raise UserError(
                f"model.attention: {attention_name(model)} does not support sequence parallelism (parallel.ulysses "
                f"{layout.ulysses} x parallel.ring {layout.ring}). Use model.attention: auto."
            )
        if facts.heads:
            check_heads(layout, facts.heads, facts.kv_heads)
    # A frozen model, such as a teacher, uses the mesh of the trained model, even if the frozen model has no experts.
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if layout.ep > 1 and not facts.experts and is_trained:
        reason = "has no experts"
        if facts.num_experts:
            reason = "does not compute its experts through transformers' interface"
        raise UserError(
            f"parallel.ep: {layout.ep} is not possible, because {type(model).__name__} {reason}. Set parallel.ep: 1."
        )
    modules: list[Any] = [model.get_submodule(name) for name in facts.experts]
    for count in sorted({module.num_experts for module in modules}):  # components may have different numbers of experts
        check_experts(layout, count)
