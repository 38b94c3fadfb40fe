"""A loss of one's own: knowledge distillation. The student learns what a frozen teacher predicts at every target.

    PYTHONPATH=examples/distill omnizoo train examples/distill/distill.yaml --train.losses.1.options.teacher FOLDER

The teacher is any Hugging Face folder with the student's vocabulary. It is sharded over the same ranks as the student
and reads the same packs, sequence-parallel or not. It is no part of the model: no gradients, in no checkpoint.
"""

import torch
import torch.nn.functional as F
from torch import nn

import omnizoo
from omnizoo import Config, LocalBatch, Mesh, ModelSection, OptimizerSection, UserError, run_model


class Distillation(omnizoo.Loss):
    """KL divergence from the teacher's distribution to the student's, both softened by `temperature`."""

    def __init__(self, teacher: str, temperature: float = 2.0) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected a number > 0")
        self.folder, self.temperature = teacher, temperature

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        own = {
            "model": ModelSection(path=self.folder, attention=config.model.attention),
            "optimizer": OptimizerSection(),
        }
        config = config.model_copy(update=own)
        self.teacher = omnizoo.build_model(config.model, config.train.precision).requires_grad_(False)
        omnizoo.parallelize_model(self.teacher, mesh, config)
        self.teacher.eval()

    @torch.no_grad()
    def soft_targets(self, batch: LocalBatch, vocabulary: int) -> torch.Tensor:
        logits, _ = run_model(self.teacher, batch)
        if logits.shape[1] != vocabulary:
            raise UserError(f"the teacher {self.folder} has {logits.shape[1]} tokens, and the student {vocabulary}")
        return F.log_softmax(logits.float() / self.temperature, dim=1)

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        soft = self.soft_targets(batch, logits.shape[1])
        student = F.log_softmax(logits.float() / self.temperature, dim=1)
        # The square keeps the gradients as large as those of cross entropy, whatever the temperature.
        each = F.kl_div(student, soft, reduction="none", log_target=True).sum(1)
        return batch.sum(each) * self.temperature**2
