"""Implements `train.deterministic`: makes torch use algorithms whose results are bitwise repeatable.

Operators without such an algorithm raise an error. Optional kernels that cannot comply are not used.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omnizoo.config.errors import UserError, first_line
from omnizoo.ops.torch_private import deterministic_compiler, replaced

log = logging.getLogger(__name__)

# This environment variable gives cuBLAS workspaces of a fixed size, so that it is deterministic. torch and cuBLAS read
# it when the first matmul runs.
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"
NOT_DETERMINISTIC = ("does not have a deterministic implementation", "Deterministic behavior was enabled")


@contextmanager
def deterministic_algorithms(is_enabled: bool) -> Iterator[None]:
    """Context manager: make all operators deterministic, or do nothing if `is_enabled` is False.

    Raises:
        UserError: If the block runs an operator that has no deterministic implementation on its device.
    """
    if not is_enabled:
        yield
        return
    os.environ.setdefault(CUBLAS_WORKSPACE, FIXED_WORKSPACE)
    mode = torch.get_deterministic_debug_mode()
    # Uninitialized memory is not filled with NaN: it would cost time, and no operator here reads it.
    settings = [
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (torch.backends.cudnn, "benchmark", False),  # otherwise the algorithm depends on measured times
        deterministic_compiler(),
    ]
    with replaced(*settings):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        except RuntimeError as error:
            if not any(text in str(error) for text in NOT_DETERMINISTIC):
                raise
            reason = first_line(error).partition(". ")[0]
            raise UserError(
                f"train.deterministic: {reason}. Set it to false, or change the model or loss that uses this operator."
            ) from error
        finally:
            torch.set_deterministic_debug_mode(mode)


def is_deterministic() -> bool:
    """Whether operators and kernels must be bitwise repeatable."""
    return torch.are_deterministic_algorithms_enabled()
