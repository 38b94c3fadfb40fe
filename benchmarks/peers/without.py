"""Run OmniZoo without one of its optimizations: `without.py direct|clip ARGUMENTS OF OMNIZOO ...`.

direct: gloo runs FSDP2's collectives, instead of direct messages between ranks. clip: gradients are clipped in a
separate pass, instead of in the update. Other optimizations have config keys or environment variables.
"""

import sys
from typing import Any

import omnizoo.cli.main
import omnizoo.parallel.fsdp.shard
import omnizoo.training.step


def disabled(*_: Any) -> bool:
    """Do nothing, and report that the optimization was not applied."""
    return False


FUNCTIONS = {
    "direct": (omnizoo.parallel.fsdp.shard, "set_collectives"),
    "clip": (omnizoo.training.step, "try_fused_step"),
}

if __name__ == "__main__":
    _, which, *rest = sys.argv
    module, name = FUNCTIONS[which]
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, disabled)
    sys.argv = ["omnizoo", *rest]
    sys.exit(omnizoo.cli.main.main())
