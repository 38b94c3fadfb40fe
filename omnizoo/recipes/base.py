"""What a recipe is: facts about a model family, and no code paths. Most are read off the model itself."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.models.hf_private import block_class_names


@dataclass(frozen=True)
class Recipe:
    """Facts that attach distribution to an untouched model from outside."""

    blocks: tuple[str, ...]  # names of the modules to shard and recompute one by one, in order of execution


def infer_recipe(model: PreTrainedModel) -> Recipe:
    """The recipe of a family without a file: blocks are the outermost modules that the model calls indivisible."""
    classes = block_class_names(model)
    blocks: list[str] = []
    for name, module in model.named_modules():
        nested = blocks and name.startswith(blocks[-1] + ".")
        if type(module).__name__ in classes and not nested:
            blocks.append(name)
    if not blocks:
        raise UserError(
            f"model: {type(model).__name__} does not say which of its modules are blocks (no `_no_split_modules`): it "
            "cannot be sharded block by block"
        )
    return Recipe(blocks=tuple(blocks))
