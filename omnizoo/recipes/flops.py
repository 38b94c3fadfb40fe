"""How the FLOPs of a model are counted: the facts that `ops.device.train_flops` needs, read off the model itself."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from omnizoo.ops.device import train_flops


@dataclass(frozen=True)
class FlopCount:
    parameters: int  # weights one token is multiplied with
    layers: int
    attention_width: int  # heads x head_dim

    def of(self, tokens: int, pairs: int) -> int:
        """FLOPs of training on `tokens` with `pairs` (query, key) pairs of attention."""
        return train_flops(self.parameters, tokens, pairs, self.layers, self.attention_width)


def count_flops(model: PreTrainedModel) -> FlopCount:
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    visited = getattr(config, "num_experts_per_tok", None) or 1
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    parameters = 0
    for parameter in model.parameters():
        if parameter is table and (head is None or head.weight is not table):
            continue  # looked up, not multiplied; a tied table is also the head, and counts as that
        fused = parameter.ndim == 3 and parameter.shape[0] == experts
        parameters += parameter.numel() * visited // experts if fused else parameter.numel()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return FlopCount(parameters, config.num_hidden_layers, width)
