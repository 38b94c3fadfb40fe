"""`omnizoo train` on a Ray cluster: one process a worker, placed by Ray.

    pip install ray
    python examples/clusters/ray_train.py --world 16 --gpus 1 my.yaml --log.dir /shared/runs/mine

Config, data, model and run folder are on storage that all machines see. If a worker or its machine fails, all ranks are
started again (`--retries`), and the run goes on from its newest checkpoint.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def address() -> tuple[str, int]:
    """Of the machine of rank 0: its name, and a port that is free there now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def node() -> str:
    return ray.get_runtime_context().get_node_id()


def rank(args: list[str], env: dict[str, str]) -> int:
    done = subprocess.run([sys.executable, "-m", "omnizoo", "train", *args], env=os.environ | env, check=False)
    if done.returncode:
        raise RuntimeError(f"rank {env['RANK']} ended with exit code {done.returncode}")
    return done.returncode


def train(args: list[str], world: int, cpus: int, gpus: int) -> None:
    group = placement_group([{"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}] * world, strategy="PACK")
    ray.get(group.ready())

    def on(number: int, function: object) -> ray.remote_function.RemoteFunction:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, scheduling_strategy=place)(function)

    try:
        host, port = ray.get(on(0, address).remote())
        nodes = ray.get([on(number, node).remote() for number in range(world)])
        # Ray shows a worker its own GPUs only: its device is always the first one.
        local = [0 if gpus else nodes[:number].count(nodes[number]) for number in range(world)]
        env = {"WORLD_SIZE": str(world), "MASTER_ADDR": host, "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(cpus)}
        own = [env | {"RANK": str(number), "LOCAL_RANK": str(local[number])} for number in range(world)]
        waiting = [on(number, rank).remote(args, own[number]) for number in range(world)]
        while waiting:  # the first failure ends all
            done, waiting = ray.wait(waiting)
            ray.get(done)
    finally:
        remove_placement_group(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, required=True, help="processes")
    parser.add_argument("--cpus", type=int, default=1, help="cores of each")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each")
    parser.add_argument("--retries", type=int, default=3)
    options, args = parser.parse_known_args()
    ray.init()
    for left in reversed(range(options.retries + 1)):
        try:
            train(args, options.world, options.cpus, options.gpus)
            break
        except ray.exceptions.RayError as error:
            if not left:
                raise
            print(f"{error}\nstarting again, {left} times left", file=sys.stderr)


if __name__ == "__main__":
    main()
