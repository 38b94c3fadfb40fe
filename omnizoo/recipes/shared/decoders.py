"""Code shared by the decoders and followers in recipes: losses with the model's head, sampling with `generate`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.sampling import Sampling
from omnizoo.ops.loss.linear_cross_entropy import LinearHead, linear_cross_entropy


def head_loss(head: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy `[N]` of `targets [N]`.

    This function calls `forward` of the head's class, because the `forward` of the instance may be replaced for the
    text loss.
    """
    forward = type(head).forward
    if forward is nn.Linear.forward:
        return linear_cross_entropy(hidden, LinearHead(head.weight, head.bias), targets)
    return code_loss(forward(head, hidden), targets)


def generate_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` for these sampling options."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


@contextmanager
def seeded(sampling: Sampling) -> Iterator[None]:
    """Context manager that seeds torch's global generator from `sampling`, because transformers uses the global one."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        # transformers warns that the penalty ignores the prompt, but the penalty is meant to apply to codes only.
        warnings.filterwarnings("ignore", message="Passing `repetition_penalty`")
        if sampling.generator is not None:
            device = sampling.generator.device
            seed = torch.randint(2**62, (1,), generator=sampling.generator, device=device)
            torch.manual_seed(int(seed))
        yield
