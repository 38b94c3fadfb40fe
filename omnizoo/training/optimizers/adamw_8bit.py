"""AdamW of torchao with 8-bit state, extended to accept a float as learning rate. Requires the package torchao."""

import torch
from torchao.optim import AdamW8bit as TorchaoAdamW8bit


class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]
    """AdamW8bit that converts the learning rate to a tensor, because the compiled step of torchao (0.18) needs one."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        super().step()
