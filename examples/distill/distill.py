"""A custom loss: knowledge distillation. The student learns the predictions of a frozen teacher at every target.

    PYTHONPATH=examples/distill omnizoo train examples/distill/distill.yaml --train.losses.1.options.teacher FOLDER

The teacher is any Hugging Face folder with the student's vocabulary. It is sharded over the same ranks as the student
and processes the same packs, with or without sequence parallelism. It is not part of the model: it has no gradients and
is not in checkpoints.
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
        self.folder = teacher
        self.temperature = temperature

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        """Build the teacher and shard it like the student."""
        teacher_sections = {
            "model": ModelSection(path=self.folder, attention=config.model.attention),
            "optimizer": OptimizerSection(),
        }
        config = config.model_copy(update=teacher_sections)
        self.teacher = omnizoo.build_model(config.model, config.train.precision).requires_grad_(False)
        omnizoo.parallelize_model(self.teacher, mesh, config)
        self.teacher.eval()

    @torch.no_grad()
    def soft_targets(self, batch: LocalBatch, vocabulary: int) -> torch.Tensor:
        """Return the teacher's softened log probabilities, [targets, vocabulary]."""
        logits, _ = run_model(self.teacher, batch)
        if logits.shape[1] != vocabulary:
            raise UserError(
                f"teacher: {self.folder} has a vocabulary of {logits.shape[1]} tokens, the student of {vocabulary}. "
                "Use a teacher with the student's tokenizer."
            )
        return F.log_softmax(logits.float() / self.temperature, dim=1)

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        soft = self.soft_targets(batch, logits.shape[1])
        student = F.log_softmax(logits.float() / self.temperature, dim=1)
        # The square keeps the scale of the gradients independent of the temperature.
        divergence = F.kl_div(student, soft, reduction="none", log_target=True).sum(1)
        return batch.sum(divergence) * self.temperature**2
