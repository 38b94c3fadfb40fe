"""Training of a mixture of experts: every layout has the losses of one process, and collectives and activation memory
match theory."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import train_in_this_world

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.batch import collate
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.packing.pack import Pack
from omnizoo.data.token_fields import make_columns
from omnizoo.models.build import build_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence.slicing import slice_tokens
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.reporting.metrics_file import read_metrics
from omnizoo.training.objective import Objective, build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step
from omnizoo.verification.rank_processes import run_in_processes

EXAMPLE = str(Path(__file__).parents[2] / "examples/qwen3_moe_tiny.yaml")
SMALL = {
    "--model.config.num_hidden_layers": 2,
    "--model.config.hidden_size": 64,
    "--data.pack_tokens": 64,
    "--data.look_ahead": 16,
    "--train.steps": 20,
    "--train.packs_per_step": 4,
    "--evaluation.every": 0,
    "--log.tensorboard": "false",
    "--checkpoint.every": 0,
}
LAYOUTS = {  # world: layouts
    2: [{"ep": 2}],
    4: [{"ulysses": 2, "ep": 4}, {"ring": 4, "ep": 2}],
    8: [{"dp_replicate": 2, "ulysses": 2, "ep": 2}, {"ulysses": 2, "ring": 2, "ep": 8}],
}
Steps = dict[str, int]  # number of steps by precision
# fp64 shows at once an error that could be hidden by fp32 rounding.
FEW: Steps = {"fp32": 6, "fp64": 3}
MANY: Steps = {"fp32": 20, "fp64": 4}


def arguments(folder: Path, layout: dict[str, int], precision: str) -> tuple[list[str], Path]:
    """Return the arguments of `omnizoo train` and the run folder."""
    name = precision + "".join(f".{axis}{size}" for axis, size in layout.items())
    options = SMALL | {f"--parallel.{axis}": size for axis, size in layout.items()}
    options |= {"--train.precision": precision, "--log.dir": folder / name}
    options |= {"--train.micro_batch": 2 if "ring" in layout else 1}  # losses do not depend on micro_batch either
    return [EXAMPLE, *(str(part) for option in options.items() for part in option)], folder / name


def train(process: Process, folder: Path, world: int, num_steps: Steps) -> None:
    os.environ |= {"RANK": str(process.rank), "WORLD_SIZE": str(process.world_size)}
    for layout in LAYOUTS.get(world, [{}]):
        for precision, steps in num_steps.items():
            options, _ = arguments(folder, layout, precision)
            assert train_in_this_world([*options, "--train.steps", steps]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worlds", "num_steps"), [((4,), FEW), pytest.param((2, 4, 8), MANY, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_losses_of_all_steps_do_not_depend_on_the_layout(
    worlds: tuple[int, ...], num_steps: Steps, tmp_path: Path
) -> None:
    for world in (1, *worlds):
        run_in_processes(world, train, tmp_path, world, num_steps)
    for precision, tolerance in (("fp32", 1e-5), ("fp64", 1e-9)):
        layouts = [{}, *(layout for world in worlds for layout in LAYOUTS[world])]
        runs = [arguments(tmp_path, layout, precision)[1] for layout in layouts]
        expected, *others = [read_metrics(run / "metrics.jsonl") for run in runs]
        assert len(expected) == num_steps[precision]
        for steps in others:
            assert [step["tokens"] for step in steps] == [step["tokens"] for step in expected]
            for key in ("loss", "loss/text", "loss/balance", "loss/router_z"):
                largest_error = max(abs(a[key] / b[key] - 1) for a, b in zip(steps, expected, strict=True))
                assert largest_error <= tolerance, (precision, key, largest_error)


def first_step(process: Process, layout: dict[str, int]) -> tuple[Objective, torch.optim.Optimizer, object, Mesh]:
    args, _ = arguments(Path("unused"), layout, "fp32")
    config = load_config(args[0], args[1:])
    mesh = build_mesh(config, process)
    model = build_model(config.model, "fp32")
    parallelize_model(model, mesh, config)
    objective = build_objective(model, mesh, config)
    loader = build_loader(config, load_tokenizer(config.model), mesh.rank, mesh.layout.world)
    model.train()
    return objective, build_optimizer(model, config), next_step(loader, Balancer(model, mesh, config)), mesh


def count_collectives(process: Process, folder: Path) -> None:
    """Write the collectives of one step on each rank."""
    reshard = {"reshard_after_forward": True}  # not the default for a model this small
    objective, optimizer, data, mesh = first_step(process, {"ulysses": 2, "ep": 4} | reshard)
    with CollectiveCounter() as counter:
        train_step(objective, optimizer, data, 1)
    local_slices = [slice_tokens(b.cu_seqlens.diff().tolist(), 1, 2)[mesh.sp_rank] for b in data.micro_batches]
    num_tokens = sum(map(len, local_slices))
    facts = {"calls": counter.calls, "bytes": counter.bytes, "tokens": num_tokens, "micro": len(local_slices)}
    parameters = {name: p.numel() for name, p in objective.model.named_parameters() if "experts" not in name}
    (folder / f"{process.rank}.json").write_text(json.dumps(facts | {"dense": sum(parameters.values())}))


@pytest.mark.slow
def test_collectives_of_a_step_match_theory(tmp_path: Path) -> None:
    run_in_processes(4, count_collectives, tmp_path)
    layers, width, kv_width, hidden, experts, choices, fp32 = 2, 8 * 16, 2 * 16, 64, 8, 2, 4
    for rank in range(4):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        calls, sent, tokens, micro = facts["calls"], facts["bytes"], facts["tokens"], facts["micro"]
        # Per layer and micro-batch, forward and backward: q, k, v, out; tokens to experts and back; their counts once;
        # routing weights to experts, and the gradients of routing weights back.
        assert calls["all-to-all"] == layers * micro * (4 + 4 + 2 + 2 + 1 + 2)
        attention = 2 * layers * tokens * (2 * width + 2 * kv_width) * fp32
        # Tokens go to experts and back, and so do their gradients. Ranks return the tokens of others: sum over ranks.
        facts["rows"] = sent["all-to-all"] - attention - layers * micro * experts * 8
        (tmp_path / f"{rank}.json").write_text(json.dumps(facts))
        # FSDP gathers each dense unit once in forward, each block again in every backward and the embedding in every
        # forward, and reduces each unit once.
        units = layers + 3
        assert calls["all-gather"] == units + micro * layers + micro - 1
        assert calls["reduce-scatter"] == units
        assert sent["reduce-scatter"] == pytest.approx(facts["dense"] * fp32, rel=0.02)  # padding to even shards
        assert set(calls) == {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"}
        assert sent["all-reduce"] < 4096  # counts and norms
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    num_tokens = sum(facts["tokens"] for facts in ranks)
    # Per token: input, output and their gradients; the routing weight and its gradient.
    numbers_per_token = 4 * hidden + 2
    assert sum(facts["rows"] for facts in ranks) == numbers_per_token * layers * choices * fp32 * num_tokens


def measure_saved_bytes(process: Process, folder: Path, layout: dict[str, int]) -> None:
    """Write how many more bytes autograd saves for backward with 512 more tokens. Saved weights cancel out."""
    objective, _, _, _ = first_step(process, layout)
    saved_bytes = []
    for tokens in (512, 1024):
        ids = np.arange(tokens, dtype=np.int32) % 500
        batch = collate([Pack(0, make_columns(input_ids=ids, labels=ids), [tokens], ["sample"])])
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            terms = objective.terms(batch)
        torch.stack([term.sum for term in terms]).sum().backward()
        saved_bytes.append(sum(storages.values()))
    (folder / f"{process.world_size}.{process.rank}.json").write_text(json.dumps(saved_bytes[1] - saved_bytes[0]))


@pytest.mark.slow
def test_four_ulysses_ranks_store_under_a_third_of_activations(tmp_path: Path) -> None:
    run_in_processes(1, measure_saved_bytes, tmp_path, {})
    run_in_processes(4, measure_saved_bytes, tmp_path, {"ulysses": 4})
    one_rank = json.loads((tmp_path / "1.0.json").read_text())
    shares = [json.loads((tmp_path / f"4.{rank}.json").read_text()) / one_rank for rank in range(4)]
    print(f"activation memory per rank with ulysses 4: {max(shares):.3f} of one rank")
    assert max(shares) <= 0.3
