"""OmniZoo without one of its optimizations: `without.py direct|clip ARGUMENTS OF OMNIZOO ...`.

direct: FSDP2's collectives by gloo itself, instead of messages between ranks. clip: a pass over all gradients clips
them, instead of the update. Others have keys or environment variables, and need no file.
"""

import sys
from typing import Any

import omnizoo.cli.main
import omnizoo.parallel.fsdp.shard
import omnizoo.training.step


def nothing(*_: Any) -> bool:
    return False


PLACES = {
    "direct": (omnizoo.parallel.fsdp.shard, "set_collectives"),
    "clip": (omnizoo.training.step, "try_fused_step"),
}

if __name__ == "__main__":
    _, which, *rest = sys.argv
    module, name = PLACES[which]
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, nothing)
    sys.argv = ["omnizoo", *rest]
    sys.exit(omnizoo.cli.main.main())
