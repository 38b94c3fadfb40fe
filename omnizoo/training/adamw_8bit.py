"""torchao's AdamW with 8-bit state, with a learning rate that may be set as a number. Needs the package torchao."""

import torch
from torchao.optim import AdamW8bit as TorchaoAdamW8bit


class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]
    """torchao (0.18) compiles its step, and so wants the learning rate as a tensor."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        super().step()
