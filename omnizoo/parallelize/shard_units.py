"""Divide a model into FSDP units, and set their prefetch order."""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.schema import Config
from omnizoo.modalities.frozen_tokenizer import frozen_tokenizers
from omnizoo.models.adapters.quantized_base import quantize_base
from omnizoo.models.hf_private import count_owners, kept_in_fp32, text_embedding
from omnizoo.models.media.media_model import MediaModel
from omnizoo.models.recipe import ModelFacts
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.experts import shard_experts
from omnizoo.parallel.fsdp.shard import Units, offload_policy, precision_policy, prefetch, shard
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallelize.memory import memory_per_rank, reshards
from omnizoo.parallelize.recompute import gather_aside


def shard_units(
    model: nn.Module, facts: ModelFacts, media: MediaModel, mesh: Mesh, config: Config, recomputation: Recomputation
) -> None:
    """Wrap experts, blocks, embedding, head and the remaining modules with FSDP2, and set their prefetch order."""
    precision = config.train.precision
    policy = precision_policy(precision)
    host_policy = offload_policy(mesh.device, "parameters" in config.parallel.offload)
    reshard = reshards(model, config, memory_per_rank(mesh))
    quantize_base(model, facts.experts)
    expert_units = shard_experts(
        [model.get_submodule(name) for name in facts.experts], mesh, reshard, policy, host_policy
    )
    for unit in expert_units:
        gather_aside(unit, recomputation)
    # Frozen tokenizers are replicated, because they are small and their codes must not depend on the run's precision.
    replicated = [p for module in frozen_tokenizers(model).values() for p in module.parameters()]
    if precision == "bf16":
        replicated += kept_in_fp32(model).values()
    embedding, head = ends_of(model)
    blocks = [model.get_submodule(name) for name in facts.blocks]
    idle = [model.get_submodule(name) for name in media.idle]
    units = Units(blocks=blocks, embedding=embedding, head=head, replicated=replicated, idle=idle)
    shard(model, units, mesh, reshard, policy, host_policy)
    if mesh.layout.ep > 1:
        prefetch_experts(model, facts, expert_units)


def prefetch_experts(model: nn.Module, facts: ModelFacts, expert_units: Collection[nn.Module]) -> None:
    """Prefetch the experts of the next block.

    Chains of blocks without experts have no host sync, so they need no explicit prefetch.
    """
    for chain in chains(facts.blocks):
        units = []
        for block in map(model.get_submodule, chain):
            units.append([block, *(module for module in block.modules() if module in expert_units)])
        if any(len(units_of_block) > 1 for units_of_block in units):
            prefetch(units)


def ends_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the embedding and the head of a language model.

    Either is None unless it is a plain layer with untied weights. Untied layers are separate units, because they are
    the largest layers, and each is needed only at the start or at the end. Tied layers are needed together, so they
    belong to the root unit.
    """
    if not isinstance(model, PreTrainedModel):
        return None, None
    owners = count_owners(model)

    def if_separate(module: Any, kind: type[nn.Module]) -> nn.Module | None:
        """Return `module` if it is a plain layer of this kind with untied weights, otherwise None."""
        if not isinstance(module, kind):
            return None
        is_plain = {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
        is_untied = all(owners[id(p)] == 1 for p in module.parameters())
        return module if is_plain and is_untied else None

    embedding = if_separate(text_embedding(model), nn.Embedding)
    head = if_separate(model.get_output_embeddings(), nn.Linear)
    return embedding, head


def chains(blocks: Sequence[str]) -> list[list[str]]:
    """Group the names of blocks by the module list that contains them. Blocks of a list run in sequence."""
    return [list(names) for _, names in groupby(blocks, lambda name: name.rpartition(".")[0])]
