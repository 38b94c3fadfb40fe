"""`parallelize`: recipe + mesh + model on meta -> a sharded model with its weights, ready to train.

The order is fixed: experts, tiles, compile, recompute, shard, then memory and weights. Nothing of the model's own code
is changed.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.adapters import begin_adapter, load_published
from omnizoo.assembly.compile import compile_blocks, kinds_for
from omnizoo.assembly.drawing import build_drawn
from omnizoo.assembly.entrance import keep_logits
from omnizoo.assembly.feed_forwards import compute_in_tiles
from omnizoo.assembly.parts import Treatments, held_bytes
from omnizoo.assembly.published import media_model
from omnizoo.assembly.quantised_base import load_held, plain_names, quantised
from omnizoo.assembly.recompute import gather_aside, recompute
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.modalities.frozen import tokenisers
from omnizoo.models.adapter import attached
from omnizoo.models.build import given_model, tensors_of
from omnizoo.models.experts import expert_modules, set_dispatch, use_dispatched
from omnizoo.models.hf_private import PACKED, attention_name, kept_in_fp32, language_model, text_embedding
from omnizoo.models.initial import initial_weights
from omnizoo.models.quantised_layers import quantise_base
from omnizoo.models.vocabulary import with_published_rows
from omnizoo.models.weights import grown_rows, weight_origins
from omnizoo.ops.device import available_memory, is_host, total_memory
from omnizoo.ops.offload import Offload
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.experts import Dispatch, check_experts, shard_experts
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import (
    Units,
    allocate,
    fill,
    move,
    offload_policy,
    precision_policy,
    prefetch,
    sent_by_first,
    shard,
)
from omnizoo.parallel.ulysses import check_heads
from omnizoo.recipes.base import Facts, read_facts

log = logging.getLogger(__name__)

KEPT_OF_MEMORY = 16  # weights that take less than 1 / this of the memory stay gathered between forward and backward


def parallelize(
    model: nn.Module, mesh: Mesh, config: Config, load: bool = True, done: Callable[[str], None] = lambda _: None
) -> None:
    """Attach expert parallelism, recompute and FSDP2/HSDP to `model` (on meta), then give it weights.

    Weights come from `model.path`, are drawn by seed, or are those of the first rank's own object (`model.given`). Each
    rank only ever holds its shards and one tensor besides. `load=False` leaves the weights undefined, for a checkpoint
    to fill; buffers that no checkpoint holds are computed all the same. `done` is told of each part when it is over.
    """
    facts = read_facts(model)
    check(facts, mesh.layout, model)
    parallel = config.parallel
    treatments = Treatments(model, config.model, config.optimizer.groups)
    treatments.apply(model)
    treatments.keep_precision(model)
    check_memory(model, mesh, config)
    media = media_model(model)
    origins = weight_origins(model, media, config.model)
    experts = [model.get_submodule(name) for name in facts.experts]
    blocks = [model.get_submodule(name) for name in facts.blocks]
    if experts:
        assert isinstance(model, PreTrainedModel)
        use_dispatched(language_model(model))
        for part in media.followers.values():
            for module in model.get_submodule(part).modules():
                if isinstance(module, PreTrainedModel) and expert_modules(module):
                    use_dispatched(module)
    recomputation = Recomputation()
    for module in experts if mesh.layout.ep > 1 else ():
        set_dispatch(module, Dispatch(mesh.group("ep"), count_of(module), recomputation))
    kinds = kinds_for(mesh.device) if config.train.compile else None
    if parallel.tile_tokens is not None:
        compute_in_tiles(model, facts, mesh, parallel.tile_tokens, parallel.precision, recomputation, kinds)
    # Inside of recomputation, which a graph with edges cannot contain, and of FSDP2, which gathers weights around it.
    if kinds is not None:
        compile_blocks(model, facts, kinds)
    offload = None
    if "activations" in parallel.offload:
        offload = Offload(mesh.device, len(blocks), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if parallel.offload and is_host(mesh.device):
        log.warning("parallel.offload: the device is the host itself, so that nothing is saved by it")
    for name, block in zip(facts.blocks, blocks, strict=True):
        by_run = parallel.recompute if isinstance(parallel.recompute, str) else None
        recompute(block, treatments.of(name).recompute or by_run, parallel.precision, recomputation, offload)
    policy, on_host = precision_policy(parallel.precision), "parameters" in parallel.offload
    away = offload_policy(mesh.device, on_host)
    home = torch.device("cpu") if on_host else mesh.device  # of shards
    reshard = reshards(model, config, total_memory(mesh.device) // (mesh.layout.world if is_host(mesh.device) else 1))
    quantise_base(model, facts.experts)
    inside = shard_experts(experts, mesh, reshard, policy, away)
    for unit in inside:
        gather_aside(unit, recomputation)
    # Frozen tokenisers compute codes, which must not depend on the run's precision; they are small, too.
    whole = [p for module in tokenisers(model).values() for p in module.parameters()]
    embedding, head = ends_of(model)
    if parallel.precision == "bf16":
        whole += kept_in_fp32(model).values()
    idle = [model.get_submodule(name) for name in media.idle]
    shard(model, Units(blocks, embedding, head, whole, idle), mesh, reshard, policy, away)
    if mesh.layout.ep > 1:
        for chain in chains(facts.blocks):
            units = [[block, *(m for m in block.modules() if m in inside)] for block in map(model.get_submodule, chain)]
            if any(len(of_block) > 1 for of_block in units):  # in a tower without experts the host waits for nothing
                prefetch(units)

    done("shard")
    buffers = {name for name, _ in model.named_buffers()}
    wanted = buffers - set(model.state_dict())
    adapter = attached(model)
    grown = grown_rows(model, origins, config.model) if load else {}
    for name, known in grown.items():
        rows = model.get_parameter(name).shape[0]
        log.info("%s has %d rows: %d published ones, and new ones for tokens without one", name, rows, known.rows)
    if load:
        wanted = buffers | plain_names(model)
        wanted = load_held(model, partial(load_published, model, origins, config.model, home, wanted))
    allocate(model, mesh.device, of_shards=home)
    # Drawn in fp32 whatever the precision of the run: fp64 widens the same numbers, not others. Buffers are
    # computed, mostly, and so have all the digits of the run's precision.
    computed = wanted & buffers if parallel.precision == "fp64" else set()
    if config.model.given is not None:
        given, computed = dict(tensors_of(given_model(config.model))), set()
        sent = sent_by_first({name: tensor for name, tensor in given.items() if name in wanted}, mesh)
        fill(model, quantised(model, sent))
        wanted &= adapter.started if adapter else set()
    for precision, names in (("fp32", wanted - computed), ("fp64", computed)):
        drawn = initial_weights(partial(build_drawn, config.model, precision), config.train.seed, names)
        fill(model, quantised(model, with_published_rows(drawn, grown)))
    if adapter is not None and load:
        begin_adapter(model, adapter)
    media.attach(config.model)
    keep_logits(model)
    move(model, mesh.device, of_shards=home)
    done("weights")


def ends_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding and the head of a language model, where each is a plain layer with weights of its own: they are its
    largest, and needed at its two ends only. Tied ones are needed together, and so belong to the root."""
    if not isinstance(model, PreTrainedModel):
        return None, None
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))

    def alone(module: Any, kind: type[nn.Module]) -> nn.Module | None:
        is_plain = isinstance(module, kind) and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
        return module if is_plain and all(owners[id(p)] == 1 for p in module.parameters()) else None

    return alone(text_embedding(model), nn.Embedding), alone(model.get_output_embeddings(), nn.Linear)


def chains(blocks: Sequence[str]) -> list[list[str]]:
    """The names of blocks, by the list of modules that they are in: those run one after the other."""
    return [list(names) for _, names in groupby(blocks, lambda name: name.rpartition(".")[0])]


def check(facts: Facts, layout: Layout, model: nn.Module) -> None:
    """Refuse a layout that this model cannot have, before anything is allocated."""
    if layout.sp > 1:
        if attention_name(model) != PACKED:
            raise UserError(
                f"parallel.ulysses {layout.ulysses} x ring {layout.ring}: sequence parallelism needs "
                f"model.attention: auto (it is {attention_name(model)})"
            )
        if facts.heads:
            check_heads(layout, facts.heads, facts.kv_heads)
    # One that is not trained, such as a teacher, goes along with a mesh that is made for another.
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    if layout.ep > 1 and not facts.experts and is_trained:
        has = "does not compute its experts through transformers' interface" if facts.num_experts else "has no experts"
        raise UserError(f"parallel.ep: {layout.ep}, but {type(model).__name__} {has}; set parallel.ep: 1")
    for count in sorted({count_of(model.get_submodule(name)) for name in facts.experts}):
        check_experts(layout, count)


def count_of(experts: Any) -> int:
    """How many a layer has; other parts of a model may have other numbers."""
    return int(experts.num_experts)


def reshards(model: nn.Module, config: Config, memory: int) -> bool:
    """Whether blocks free their gathered weights after forward, on ranks of that much memory."""
    asked = config.parallel.reshard_after_forward
    itemsize = torch.bfloat16.itemsize if config.parallel.precision == "bf16" else None
    whole = sum(p.numel() * (itemsize or p.itemsize) for p in model.parameters())
    return whole * KEPT_OF_MEMORY > memory if asked is None else asked


def check_memory(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Refuse a model whose weights alone, with gradients and the optimizer's state, are more than the machine has: it
    would be killed somewhere in the middle of being allocated."""
    each, there = held_bytes(model, config) // mesh.layout.fsdp, total_memory(mesh.device)
    if "parameters" in config.parallel.offload:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if each * ranks > (left := available_memory()):
            raise UserError(
                f"parallel.offload: weights, gradients and the optimizer's state of {ranks} rank(s) take "
                f"{each * ranks / 2**30:,.3g} GiB on the host, which has {left / 2**30:,.3g} GiB left: leave "
                "`parameters` out, or share the model among more nodes (parallel.dp_shard)"
            )
    elif each > there:
        count = sum(parameter.numel() for parameter in model.parameters())
        raise UserError(
            f"model: {count:,} parameters with gradients and the optimizer's state take {each / 2**30:,.0f} GiB on "
            f"each of {mesh.layout.world} rank(s), and there are {there / 2**30:,.0f} GiB: see the sizes in "
            "model.config, or shard it over more ranks (parallel.dp_shard)"
        )
