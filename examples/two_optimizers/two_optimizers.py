"""Two models with one optimizer each learn from each other: a custom training loop that uses only the public API.

Each model minimizes cross entropy plus the divergence from the other's predictions (deep mutual learning, Zhang et al.,
2018). They take turns, as the two sides of a GAN do: the second model already learns from the updated first one.

python examples/two_optimizers/two_optimizers.py examples/text_tiny.yaml --train.steps 20
torchrun --standalone --nproc-per-node 2 examples/two_optimizers/two_optimizers.py examples/text_tiny.yaml
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import omnizoo


class Peer(omnizoo.Loss):
    """KL divergence from the other model's predictions to those of the trained one, at every target."""

    def __init__(self, other: nn.Module) -> None:
        self.other = other

    @torch.no_grad()
    def prepare(self, batch: Any) -> None:
        """Run the other model on the same packs, before the trained model runs."""
        self.other.eval()
        logits = self.other(**batch.inputs).logits.squeeze(0)
        self.expected = logits.float().log_softmax(dim=-1)
        self.other.train()

    def from_logits(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        predicted = logits.float().log_softmax(dim=-1)
        divergence = F.kl_div(predicted, self.expected, reduction="none", log_target=True).sum(dim=-1)
        return batch.sum(divergence)


def main(path: str, overrides: list[str]) -> None:
    config = omnizoo.load_config(path, overrides)
    other_seed = ["--train.seed", str(config.train.seed + 1)]
    configs = [config, omnizoo.load_config(path, [*overrides, *other_seed])]

    with omnizoo.process_group() as process:
        mesh = omnizoo.build_mesh(config, process)
        models = [omnizoo.build_model(config.model, config.train.precision) for _ in configs]
        tokenizer = omnizoo.load_tokenizer(config.model)
        media = omnizoo.read_modalities(models[0], config.model)
        loader = omnizoo.build_loader(config, tokenizer, mesh.rank, mesh.layout.world, **media)
        for model, model_config in zip(models, configs, strict=True):
            omnizoo.parallelize_model(model, mesh, model_config)  # random weights, from the seed of its config

        balancer = omnizoo.Balancer(models[0], mesh, config)
        optimizers = [omnizoo.build_optimizer(model, config) for model in models]
        objectives = []
        for model, other in zip(models, reversed(models), strict=True):
            objectives.append(omnizoo.build_objective(model, mesh, config, extra_losses={"peer": Peer(other)}))

        for step in range(1, config.train.steps + 1):
            data = omnizoo.next_step(loader, balancer)
            for name, objective, optimizer in zip("ab", objectives, optimizers, strict=True):
                optimizer.zero_grad()
                for batch in objective.micro_batches(data, step):
                    loss = objective.loss(batch)
                    objective.backward(loss)
                result = omnizoo.optimizer_step(objective, optimizer, step)
                if mesh.is_first:
                    terms = "  ".join(f"{term} {mean:.6f}" for term, mean in result.terms.items())
                    print(f"step {step} model {name}  {terms}  grad norm {result.grad_norm:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
