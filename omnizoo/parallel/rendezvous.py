"""Read rank, world size and the store's address from the environment that our launcher, torchrun or Slurm set.

This module does not import torch, so a command can reject a layout before any process starts.
"""

import os
import re

from omnizoo.config.errors import UserError

NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
# Ports of the store under Slurm, below Linux's ephemeral ports (32768 and up).
FIRST_PORT = 15_000
NUM_PORTS = 10_000


def place_in_world() -> tuple[int, int, int] | None:
    """Return (rank, world size, local rank) as set by our launcher, torchrun or Slurm; otherwise None."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = _number("RANK")
        world_size = _number("WORLD_SIZE")
        local_rank = _number("LOCAL_RANK", "0")
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _number("SLURM_NTASKS", "1") > 1:
        rank = _number("SLURM_PROCID")
        world_size = _number("SLURM_NTASKS")
        local_rank = _number("SLURM_LOCALID", "0")
    else:
        return None
    if rank >= world_size:
        raise UserError(
            f"RANK: {rank} is invalid for a world size of {world_size}. Use a rank from 0 to {world_size - 1}."
        )
    return rank, world_size, local_rank


def ranks_on_node() -> int:
    """Return the number of ranks on this node, as set by our launcher, torchrun or Slurm. Default: 1.

    `srun` describes the tasks of all nodes in one variable: `8(x2),4` are two nodes with 8 tasks, then one with 4.
    """
    env = os.environ
    if "LOCAL_WORLD_SIZE" in env:
        return max(1, _number("LOCAL_WORLD_SIZE"))
    if "RANK" in env or "SLURM_STEP_ID" not in env:
        return 1
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return 1
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number("SLURM_NODEID", "0")
    return max(1, counts[node]) if node < len(counts) else 1


def tasks_without_srun() -> int:
    """Return the number of Slurm tasks if this process is the batch script of a job with several tasks, otherwise 0."""
    env = os.environ
    is_script = "SLURM_PROCID" in env and "SLURM_STEP_ID" not in env and "RANK" not in env
    tasks = _number("SLURM_NTASKS", "1") if is_script else 1
    return tasks if tasks > 1 else 0


def meeting_point(world_size: int) -> tuple[str, int]:
    """Return (host, port) of the store.

    Under Slurm, the default is the first node of the step, and a port derived from the job id.
    """
    env = os.environ
    host = env.get("MASTER_ADDR")
    port = env.get("MASTER_PORT")
    nodes = next((env[name] for name in NODE_LISTS if env.get(name)), None)
    if nodes is not None and "RANK" not in env:
        host = host or first_host(nodes)
        has_step = env.get("SLURM_STEP_ID", "0").isdecimal()
        step = _number("SLURM_STEP_ID", "0") if has_step else 0
        port = port or str(FIRST_PORT + (_number("SLURM_JOB_ID", "0") * 7 + step) % NUM_PORTS)
    if not host or not port:
        raise UserError(
            f"MASTER_ADDR and MASTER_PORT: both must be set, because the world size is {world_size}. Export them in "
            "the job script (the name of the first node and a free port), or start with torchrun or srun."
        )
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT: {port!r} is not a valid port. Use a port from 1 to 65535.")
    return host, int(port)


def first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list: `gpu003` for `gpu[003-006,9],login1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    name = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first)
    if not name:
        raise UserError(f"SLURM_NODELIST: {nodes!r} contains no node name. Expected names such as gpu[01-04].")
    return name


def _number(name: str, default: str = "") -> int:
    """Return a non-negative integer from an environment variable."""
    text = os.environ.get(name, default)
    if not re.fullmatch("[0-9]{1,10}", text):
        raise UserError(f"{name}: {text!r} is not a number. Start with torchrun or srun, which set this variable.")
    return int(text)
