"""How much memory the tensors of a training loop take at its peak, counted alike for any loop.

    python benchmarks/tensor_peak.py                                  # the table of docs/memory.md
    python benchmarks/tensor_peak.py --models dense --vocabularies 32000 --processes 1 --only omnizoo,tuned
    python benchmarks/tensor_peak.py --explain 12 --models moe ...    # and the largest of what is there at the peak

Every storage counts from the operator that makes it (or first sees it) until it is freed: weights, gradients, state,
activations, temporaries. What a kernel takes inside of itself, and what an allocator loses, is not seen. Loops run
unchanged: `install()` in their process is all, and a step ends when an optimizer's `step` returns.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).resolve().parent
TOKENS, STEPS, WARM = 1024, 3, 1  # steps that are not looked at: the first has no state of the optimizer yet


class LiveTensors(TorchDispatchMode):
    """`with LiveTensors() as live: ...`; `live.bytes` are there now, `live.peak` were at the most since `begin()`."""

    def __init__(self, explain: bool = False) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.explain = explain
        self._sizes: dict[int, int] = {}  # by storage
        self._names: dict[int, str] = {}
        self._there: Counter[str] = Counter()
        self._at_peak: Counter[str] = Counter()
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "LiveTensors":
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resized  # FSDP2 frees gathered weights by it
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it unpacks itself, and its local tensors come by
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, func)
        return result

    def see(self, tensor: torch.Tensor, by: Any = "") -> None:
        if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._names[key] = self._describe(tensor, by) if self.explain else ""
            weakref.finalize(storage, self._end, key)
            self._set(key, storage.nbytes())

    def begin(self) -> None:
        self.peak = self.bytes
        self._at_peak = self._there.copy()

    def largest(self, count: int) -> list[tuple[str, int]]:
        """What was there at the peak, where `explain` was asked for."""
        return self._at_peak.most_common(count)

    def _set(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes[key]
        if self.explain:
            self._there[self._names[key]] += size - self._sizes[key]
        self._sizes[key] = size
        if self.bytes > self.peak:
            self.peak = self.bytes
            if self.explain:
                self._at_peak = self._there.copy()

    def _end(self, key: int) -> None:
        self._set(key, 0)
        del self._sizes[key], self._names[key]

    def _describe(self, tensor: torch.Tensor, by: Any) -> str:
        frame, lines = sys._getframe(2), []
        while frame is not None and len(lines) < 2:
            file = frame.f_code.co_filename
            if ("/torch/" not in file or "/fsdp/_fully_shard/" in file) and file != __file__:
                lines.append(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {by} {' < '.join(lines)}"


def install(out: Path, explain: int = 0) -> None:
    """From here on, for this process: the peak of each step, one JSON object a line, goes to `out`."""
    live = LiveTensors(explain=bool(explain))
    live.__enter__()
    file = out.open("a", buffering=1)

    def end_of_step(*_: Any) -> None:
        file.write(json.dumps({"peak": live.peak, "after": live.bytes, "largest": live.largest(explain)}) + "\n")
        live.begin()

    register_optimizer_step_post_hook(end_of_step)


def peak_of(folder: Path) -> tuple[int, int, list[tuple[str, int]]]:
    """Of the rank with the most: its peak, what stays between its steps, and the largest at the peak."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]
    most = max((max(rank[WARM:], key=lambda step: step["peak"]) for rank in ranks), key=lambda step: step["peak"])
    return most["peak"], most["after"], most["largest"]


def ours(*more: str) -> list[str]:
    fixed = {
        "model.path": "{assets}/{model}",
        "data.sources.0.path": "{assets}/text.jsonl",
        "data.pack_tokens": str(TOKENS),
        "train.steps": str(STEPS),
        "train.global_batch": "{processes}",
        "train.lr": "1e-4",
        "train.schedule": "constant",
        "train.grad_clip": "1.0",
        "optimizer.weight_decay": "0.1",
        "log.dir": "{run}/log",
    }
    return ["-m", "omnizoo", "train", "{run}/empty.yaml", *(p for k, v in fixed.items() for p in (f"--{k}", v)), *more]


def plain(*more: str) -> list[str]:
    return [str(HERE / "peers" / "plain.py"), "{assets}", "{model}", "--steps", str(STEPS), *more]


LEAN = ("--parallel.recompute", "full", "--parallel.reshard_after_forward", "true", "--parallel.tile_tokens", "256")
CONTESTANTS = {
    "omnizoo": ours(),
    "omnizoo, leanest": ours(*LEAN, "--optimizer.moments", "bf16"),
    "tuned": plain("--tuned"),
    "tuned, resharding": plain("--tuned", "--reshard"),
}


def run(
    command: list[str], model: str, processes: int, assets: Path, explain: int
) -> tuple[int, int, list[tuple[str, int]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty.yaml").write_text("{}\n")
        (folder / "peaks").mkdir()
        filled = {"assets": assets, "model": model, "processes": processes, "run": folder}
        own = [str(HERE / "tensor_peak.py"), "--explain", str(explain), "--under", str(folder / "peaks")]
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        ended = subprocess.run(
            [*start, *own, *(part.format(**filled) for part in command)],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{(ended.stderr or ended.stdout)[-3000:]}")
        return peak_of(folder / "peaks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--vocabularies", default="32000,152000")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--only", default="", help="names of contestants, by semicolon; default: all")
    parser.add_argument("--explain", type=int, default=0, metavar="N", help="name the N largest at the peak")
    parser.add_argument("--assets", type=Path, default=HERE.parent / "runs" / "bench_assets")
    args = parser.parse_args()
    from peers.assets import make_assets

    wanted = [name.strip() for name in args.only.split(";") if name.strip()] or list(CONTESTANTS)
    print("| model | vocabulary | processes | " + " | ".join(wanted) + " |")
    print("|---" * (3 + len(wanted)) + "|")
    for vocabulary in map(int, args.vocabularies.split(",")):
        assets = args.assets.resolve() if vocabulary == 32_000 else args.assets.resolve() / str(vocabulary)
        make_assets(assets, vocabulary)
        for model in args.models.split(","):
            for processes in map(int, args.processes.split(",")):
                peaks = {}
                for name in wanted:
                    peaks[name], after, largest = run(CONTESTANTS[name], model, processes, assets, args.explain)
                    for what, size in largest:
                        print(f"    {size / 2**20:8.1f} MiB  {what}", file=sys.stderr)
                    said = f"{model}, {vocabulary}, {processes}: {name} {peaks[name] / 2**20:.1f}, after the step"
                    print(f"{said} {after / 2**20:.1f} MiB", file=sys.stderr, flush=True)
                least = min((peak for name, peak in peaks.items() if not name.startswith("omnizoo")), default=0)
                cells = [f"{peak / 2**20:.0f}" + (f" ({peak / least:.2f})" if least else "") for peak in peaks.values()]
                print(f"| {model} | {vocabulary} | {processes} | " + " | ".join(cells) + " |", flush=True)
    return 0


def under(out: Path, explain: int, command: list[str]) -> None:
    """Run a script, or a module (`-m`), in this process, and count."""
    install(out / f"rank{os.environ.get('RANK', '0')}.jsonl", explain)
    sys.path.insert(0, os.getcwd())
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    if "--under" in sys.argv[1:4]:
        place = sys.argv.index("--under")
        under(Path(sys.argv[place + 1]), int(sys.argv[place - 1]), sys.argv[place + 2 :])
    else:
        sys.exit(main())
