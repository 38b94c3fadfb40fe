"""Run `omnizoo train` on a Ray cluster: Ray places one rank per worker.

    pip install ray
    python examples/clusters/ray_train.py --world 16 --gpus 1 my.yaml --log.dir /shared/runs/mine

Config, data, model and run folder are on storage that all machines share. If a worker or its machine fails, all ranks
are restarted (`--retries`), and the run resumes from its newest checkpoint.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def rank0_address() -> tuple[str, int]:
    """Return the IP address and a free port of the machine that this runs on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def node_id() -> str:
    """Return the Ray id of the machine that this runs on."""
    return ray.get_runtime_context().get_node_id()


def run_rank(args: list[str], env: dict[str, str]) -> int:
    """Run `omnizoo train` as one rank.

    Raises:
        RuntimeError: If its exit code is not 0.
    """
    process = subprocess.run([sys.executable, "-m", "omnizoo", "train", *args], env=os.environ | env, check=False)
    if process.returncode:
        raise RuntimeError(f"rank {env['RANK']} ended with exit code {process.returncode}")
    return process.returncode


def train(args: list[str], world: int, cpus: int, gpus: int) -> None:
    """Start all ranks on Ray workers and wait for them; the first failure is raised."""
    resources = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    group = placement_group([resources] * world, strategy="PACK")
    ray.get(group.ready())

    def on_worker(rank: int, function: object) -> ray.remote_function.RemoteFunction:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, scheduling_strategy=strategy)(function)

    try:
        host, port = ray.get(on_worker(0, rank0_address).remote())
        nodes = ray.get([on_worker(rank, node_id).remote() for rank in range(world)])
        # Ray makes only the GPUs of a worker visible to it, so its device is always the first one.
        local_ranks = [0 if gpus else nodes[:rank].count(nodes[rank]) for rank in range(world)]
        env = {"WORLD_SIZE": str(world), "MASTER_ADDR": host, "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(cpus)}
        rank_envs = [env | {"RANK": str(rank), "LOCAL_RANK": str(local_ranks[rank])} for rank in range(world)]
        waiting = [on_worker(rank, run_rank).remote(args, rank_envs[rank]) for rank in range(world)]
        while waiting:  # `ray.get` raises the first failure
            finished, waiting = ray.wait(waiting)
            ray.get(finished)
    finally:
        remove_placement_group(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument("--cpus", type=int, default=1, help="CPU cores per rank (default: 1)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per rank (default: 0)")
    parser.add_argument("--retries", type=int, default=3, help="restarts after a failure (default: 3)")
    options, args = parser.parse_known_args()
    ray.init()
    for retries_left in reversed(range(options.retries + 1)):
        try:
            train(args, options.world, options.cpus, options.gpus)
            break
        except ray.exceptions.RayError as error:
            if not retries_left:
                raise
            print(f"{error}\nRestarting all ranks, {retries_left} retries left.", file=sys.stderr)


if __name__ == "__main__":
    main()
