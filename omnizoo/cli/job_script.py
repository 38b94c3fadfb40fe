"""`omnizoo launch`: the file that a cluster's scheduler takes to run `omnizoo train` on several machines.

It is printed, not submitted: `omnizoo launch my.yaml --slurm --nodes 4 > job.sh`. Config and layout are checked first,
so that no job waits a night in the queue to find a misspelt key.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import micro_batches, plan_layout

MOST = 100_000  # of nodes, and of processes on one
PORT = 29500

SLURM = """\
#!/bin/bash
# {world} processes, {nproc} a node. Submit: sbatch {file}
# For longer than --time: sbatch --array=1-5%1 {file}   (five times in a row, each goes on where the last one stopped)
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={nproc}
{gpus}#SBATCH --cpus-per-task={cpus}
#SBATCH --time={time}
{extra}#SBATCH --signal=TERM@300      # five minutes before the end: a checkpoint is written, and the run ends
#SBATCH --requeue              # after a node has failed: the run goes on from its newest checkpoint
#SBATCH --open-mode=append
#SBATCH --output={name}_%j.log
set -euo pipefail
export OMP_NUM_THREADS={cpus}
# Ranks find each other by themselves: the first node of the job, and a port made of the job's number.
exec srun --kill-on-bad-exit=1 {command}
"""

KUBERNETES = """\
# {world} processes, {nproc} a pod, by torchrun. Submit: kubectl apply -f {file}
# Pods find the first one by the name that the service gives it. `storage` holds config, data, model and runs.
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec: {{clusterIP: None, selector: {{job-name: {name}}}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 100            # a pod that fails is started again, and the run goes on from its newest checkpoint
  template:
    spec:
      restartPolicy: Never
      subdomain: {name}
      terminationGracePeriodSeconds: 300     # time to write a checkpoint
      containers:
        - name: train
          image: {image}
          workingDir: /storage
          command: ["/bin/sh", "-c"]
          args:
            - >-
              exec {command}
{limits}          volumeMounts:
            - {{name: storage, mountPath: /storage}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - {{name: storage, persistentVolumeClaim: {{claimName: storage}}}}
        - {{name: shm, emptyDir: {{medium: Memory}}}}
"""


@dataclass(frozen=True)
class Job:
    """What a scheduler must know: of one process on each of `nproc` devices of `nodes` machines."""

    nodes: int
    nproc: int
    cpus: int = 8  # of each process: its loader workers run there, too
    gpus: bool = True
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    image: str = "REGISTRY/omnizoo:latest"

    @property
    def world(self) -> int:
        return self.nodes * self.nproc


def job_script(kind: str, path: str, overrides: list[str], job: Job) -> str:
    """The text for a scheduler of `kind`, slurm or kubernetes."""
    for flag, value in (("--nodes", job.nodes), ("--nproc", job.nproc), ("--cpus", job.cpus)):
        if not 1 <= value <= MOST:
            raise UserError(f"{flag} is {value}; expected a number from 1 to {MOST}")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", job.time):
        raise UserError(f"--time is {job.time!r}; expected hours:minutes:seconds, or days-hours:minutes:seconds")
    for flag, text in (("--partition", job.partition), ("--account", job.account), ("--image", job.image)):
        if text is not None and not re.fullmatch(r"[\w.:/@,+-]+", text):
            raise UserError(f"{flag} is {text!r}; expected a name without spaces")
    config = load_config(path, overrides)
    layout = plan_layout(config.parallel, job.world)
    micro_batches(layout, config.train.global_batch, config.train.micro_batch)
    name = re.sub(r"[^a-z0-9]+", "-", Path(config.log.dir).name.lower()).strip("-")[:50] or "train"
    train = shlex.join(["omnizoo", "train", path, *overrides])
    shared = {"name": name, "nodes": job.nodes, "nproc": job.nproc, "world": job.world, "cpus": job.cpus}
    if kind == "slurm":
        extra = {"partition": job.partition, "account": job.account}
        return SLURM.format(
            **shared,
            file="job.sh",
            gpus=f"#SBATCH --gpus-per-node={job.nproc}\n" if job.gpus else "",
            time=job.time,
            extra="".join(f"#SBATCH --{key}={value}\n" for key, value in extra.items() if value),
            command=train,
        )
    cores = job.nproc * job.cpus
    limits = f"{{cpu: {cores}, nvidia.com/gpu: {job.nproc}}}" if job.gpus else f"{{cpu: {cores}}}"
    return KUBERNETES.format(
        **shared,
        file="job.yaml",
        image=job.image,
        command=f"{torchrun(job.nodes, job.nproc, '$JOB_COMPLETION_INDEX', f'{name}-0.{name}')} -m {train}",
        limits=f"          resources: {{limits: {limits}}}\n",
    )


def torchrun(nodes: int, nproc: int, node: str, host: str) -> str:
    """How torchrun is called on each of several machines, `node` being which of them it is."""
    where = f"--node-rank={node} --master-addr={host} --master-port={PORT}"
    return f"torchrun --nnodes={nodes} --nproc-per-node={nproc} {where}"
