"""How the FLOPs of a model are counted: the facts that `ops.device.train_flops` needs, read off the model itself."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from omnizoo.ops.device import train_flops
from omnizoo.recipes.base import count_experts, recipe_of


@dataclass(frozen=True)
class FlopCount:
    parameters: int  # weights one token is multiplied with
    layers: int
    attention_width: int  # heads x head_dim

    def of(self, tokens: int, pairs: int) -> int:
        """FLOPs of training on `tokens` with `pairs` (query, key) pairs of attention."""
        return train_flops(self.parameters, tokens, pairs, self.layers, self.attention_width)


def count_flops(model: nn.Module) -> FlopCount:
    """Of a user's own module only what its weights cost is known."""
    if not isinstance(model, PreTrainedModel):
        tables = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        return FlopCount(sum(p.numel() for p in model.parameters() if p not in tables), layers=0, attention_width=0)
    config = model.config.get_text_config()
    experts, visited = count_experts(config)
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    parameters = 0
    for parameter in model.parameters():
        if parameter is table and (head is None or head.weight is not table):
            continue  # looked up, not multiplied; a tied table is also the head, and counts as that
        fused = experts > 0 and parameter.ndim == 3 and parameter.shape[0] == experts
        parameters += parameter.numel() * visited // experts if fused else parameter.numel()
    names = recipe_of(config.model_type).attention_width
    # From the mapping: of a config whose layers differ, the attribute cannot be read.
    default = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    # A pair costs a product of the query-key width and one of the value width; `train_flops` takes their mean.
    width = sum(getattr(config, name) for name in names) / 2 if names else default
    return FlopCount(parameters, config.num_hidden_layers, int(config.num_attention_heads * width))
