"""Optimizers as parts: each kind is what its formulas say, on every layout, over a save and a resume; groups by name,
the average of weights, optimizers and schedules of one's own, and mistakes in one line."""

import inspect
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import (
    DECAY,
    EXPERTS,
    KINDS,
    LR,
    RUN_STEPS,
    RUNS,
    SAVED,
    STEPS,
    config_of,
    give,
    gradients,
    sharded,
    train,
    walk,
)
from processes import run_on_ranks, train_in_this_world
from safetensors.torch import load_file, save_file
from tiny import read_steps

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.optimizer_options import OPTIMIZERS
from omnizoo.models.build import build_model
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.memory import saved_bytes
from omnizoo.training.optimizers import adafactor
from omnizoo.training.optimizers.build import BF16, build_optimizer, set_learning_rate, update_average
from omnizoo.training.optimizers.build import KINDS as BUILT_IN

ROOT = Path(__file__).parents[3]
Layouts = dict[str, dict[str, int]]  # axes by name
TWO: Layouts = {"dp2": {}, "ep2": {"ep": 2}}
FOUR: Layouts = {"hsdp": {"dp_replicate": 2}, "dp4.ep2": {"ep": 2}}  # all axes
OTHERS: Layouts = {"dp4": {}, "dp4.ep4": {"ep": 4}}
WITHIN = {"fp32": 2e-5, "fp64": 1e-12}


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lion"))


# The reference: plain torch on whole tensors, one matrix at a time.


def is_hidden(name: str) -> bool:
    return name.endswith("_proj.weight") or ".experts." in name


def decays(name: str) -> bool:
    return not ("norm" in name or "embed_tokens" in name)


def newton_schulz(g: torch.Tensor) -> torch.Tensor:
    x = g / g.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


def heads_of(name: str) -> int:
    if name.endswith("q_proj.weight"):
        return int(EXPERTS["num_attention_heads"])
    return int(EXPERTS["num_key_value_heads"]) if name.endswith(("k_proj.weight", "v_proj.weight")) else 1


def plain_muon(
    p: torch.Tensor, grads: list[torch.Tensor], rates: list[float], decay: float, heads: int
) -> torch.Tensor:
    if heads > 1:  # each head is a separate matrix
        grads_by_head = [g.chunk(heads) for g in grads]
        parts = [
            plain_muon(part, [head_grads[i] for head_grads in grads_by_head], rates, decay, heads=1)
            for i, part in enumerate(p.chunk(heads))
        ]
        return torch.cat(parts)
    p, momentum = p.clone(), torch.zeros_like(p)
    for g, lr in zip(grads, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * g
        update = 0.05 * g + 0.95 * momentum
        orthogonal = torch.stack([newton_schulz(m) for m in update]) if p.ndim == 3 else newton_schulz(update)
        p = p * (1 - lr * decay) - lr * 0.2 * max(p.shape[-2:]) ** 0.5 * orthogonal
    return p


def plain_torch(make: Callable[[Any], Any], p: torch.Tensor, grads: list[torch.Tensor], rates: list[float]) -> Any:
    p = p.clone().requires_grad_()
    optimizer = make([p])
    for g, lr in zip(grads, rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = g
        optimizer.step()
    return p.detach()


def expected(kind: str, before: dict[str, torch.Tensor], split_heads: bool = True) -> dict[str, torch.Tensor]:
    from lion import Lion

    dtype = next(iter(before.values())).dtype
    steps = [dict(gradients({n: p.shape for n, p in before.items()}, dtype, step)) for step in range(1, STEPS + 1)]
    rates = [LR / step for step in range(1, STEPS + 1)]
    after = {}
    for name, p in before.items():
        decay, grads = DECAY if decays(name) else 0.0, [step[name] for step in steps]
        classes: dict[str, Callable[[Any], Any]] = {
            "adamw": lambda ps, d=decay: torch.optim.AdamW(ps, betas=(0.9, 0.95), weight_decay=d, foreach=False),
            "adafactor": lambda ps, d=decay: torch.optim.Adafactor(ps, weight_decay=d),
            "lion:Lion": lambda ps, d=decay: Lion(ps, LR, weight_decay=d, betas=(0.9, 0.98)),
        }
        if kind == "muon" and is_hidden(name):
            after[name] = plain_muon(p, grads, rates, decay, heads_of(name) if split_heads else 1)
        else:
            after[name] = plain_torch(classes["adamw" if kind == "muon" else kind], p, grads, rates)
    return after


def assert_same_walk(
    kind: str, before: dict[str, Any], after: dict[str, Any], precision: str, split_heads: bool = True
) -> None:
    wanted = expected(kind, before, split_heads)
    errors = {name: float((after[name] - w).norm() / (w - before[name]).norm()) for name, w in wanted.items()}
    print(f"{kind} {precision}: {max(errors.values()):.1e}")
    assert {name: error for name, error in errors.items() if not error <= WITHIN[precision]} == {}


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_match_formulas_on_full_tensors(
    kind: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adafactor, "PIECE_ON_HOST", 100)
    config = load_config(config_of(tmp_path, kind, train={"precision": precision}), [])
    with process_group() as process:
        assert_same_walk(kind, *walk(config, process), precision)


def test_muon_without_split_heads_updates_whole_projections(tmp_path: Path) -> None:
    path = config_of(tmp_path, "muon", optimizer={"options": {}}, train={"precision": "fp64"})
    with process_group() as process:
        assert_same_walk("muon", *walk(load_config(path, []), process), "fp64", split_heads=False)


def walk_all(process: Process, folder: Path, layouts: Layouts, precision: str) -> None:
    adafactor.PIECE_ON_HOST = 100  # several pieces of every matrix; these ranks do nothing else
    for kind in KINDS:
        for layout, axes in layouts.items():
            overrides = [f"--parallel.{axis}={size}" for axis, size in axes.items()]
            config = load_config(folder / kind / "tiny.yaml", [*overrides, f"--train.precision={precision}"])
            walked = walk(config, process)
            if process.rank == 0:
                for when, tensors in zip(("before", "after"), walked, strict=True):
                    save_file(tensors, folder / kind / f"{layout} {when}.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", pytest.param("fp32", marks=pytest.mark.long)])  # fp32: above, and below
@pytest.mark.parametrize(
    ("world", "layouts"),
    [(4, FOUR), *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, OTHERS), (2, TWO)))],
    ids=["four", "others", "two"],
)
def test_steps_on_every_layout_match_formulas(world: int, layouts: Layouts, precision: str, tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        config_of(tmp_path / kind, kind)
    result = run_on_ranks(walk_all, world, tmp_path, layouts, precision)
    assert result.code == 0, result.stdout + result.stderr
    for kind in KINDS:
        for layout in layouts:
            walked = (load_file(tmp_path / kind / f"{layout} {when}.safetensors") for when in ("before", "after"))
            assert_same_walk(kind, *walked, precision)


def resumed(folder: Path, kind: str) -> list[str]:
    return ["--checkpoint.resume", str(folder / kind / "four" / "checkpoints" / f"step_{SAVED:08d}")]


def four_ranks(process: Process, folder: Path) -> None:
    for kind in RUNS:
        train(folder, kind, "four", "--parallel.ep", "2")
        train(folder, kind, "four again", "--parallel.ep", "2", *resumed(folder, kind))


def two_ranks(process: Process, folder: Path) -> None:
    for kind in RUNS:
        train(folder, kind, "two", "--parallel.ulysses", "2")
        train(folder, kind, "four, then two", *resumed(folder, kind))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "lion"))
        for kind in RUNS:
            (folder / kind).mkdir()
            config_of(folder / kind, kind, train={"lr": 0.1 if kind == "adafactor" else 3e-3})
        for function, world in ((four_ranks, 4), (two_ranks, 2)):
            result = run_on_ranks(function, world, folder)
            assert result.code == 0, result.stdout + result.stderr
        for kind in RUNS:
            train(folder, kind, "one")
    return folder


def curve(folder: Path, kind: str, name: str) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in read_steps(folder / kind / name)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_runs_on_two_and_four_ranks_match_one_process(runs: Path, kind: str) -> None:
    one = curve(runs, kind, "one")
    assert list(one) == list(range(1, RUN_STEPS + 1))
    assert one[RUN_STEPS][0] < one[1][0]
    for name in ("two", "four"):
        for step, values in curve(runs, kind, name).items():
            assert values == pytest.approx(one[step], rel=1e-9), (name, step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_resumed_run_matches_uninterrupted_run_bit_for_bit(runs: Path, kind: str) -> None:
    whole, again = curve(runs, kind, "four"), curve(runs, kind, "four again")
    assert again == {step: whole[step] for step in range(SAVED + 1, RUN_STEPS + 1)}
    last = Path("checkpoints", f"step_{RUN_STEPS:08d}", "tensors")
    for file in (runs / kind / "four" / last).glob("*.safetensors"):
        saved = load_file(file)
        other = load_file(runs / kind / "four again" / last / file.name)
        assert saved.keys() == other.keys()
        assert all(torch.equal(saved[name], other[name]) for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_checkpoint_of_four_ranks_resumes_on_two(runs: Path, kind: str) -> None:
    whole = curve(runs, kind, "four")
    for step, values in curve(runs, kind, "four, then two").items():
        assert values == pytest.approx(whole[step], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    ["dp2.uly2.ep2", *(pytest.param(layouts, marks=pytest.mark.long) for layouts in ("uly2.ring2", "dp4,dp4.ep4"))],
)  # what it computes on each axis is compared with formulas above
def test_verify_passes_with_muon(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    groups = "[{match: 'model.layers.3.*', lr: 1e-5}, {match: '*embed*', freeze: true}]"
    args = ["--optimizer.kind", "muon", "--optimizer.groups", groups]
    example = str(ROOT / "examples/qwen3_moe_tiny.yaml")
    assert main(["verify", example, "--world", "4", "--layouts", layouts, *args]) == 0
    count = len(layouts.split(","))
    assert f"{count} of {count} layouts of 4 ranks agree with one process (fp32)" in capfd.readouterr().out


# Groups.


def groups_of(config: Config) -> dict[str, dict[str, Any]]:
    """What is set for each trained parameter, by name."""
    with process_group() as process:
        model = sharded(config, process)
        optimizer = build_optimizer(model, config)
        names = {p: name for name, p in model.named_parameters()}
        parts = getattr(optimizer, "parts", [optimizer])
        return {
            names[p]: {"kind": type(part).__name__, **{k: v for k, v in group.items() if k != "params"}}
            for part in parts
            for group in part.param_groups
            for p in group["params"]
        }


def test_groups_set_lr_decay_kind_and_options_by_name(tmp_path: Path) -> None:
    groups = [
        {"match": "*.layers.0.*q_proj*", "lr": 1e-3, "weight_decay": 0.5},
        {"match": ["*.q_proj.weight", "*norm.weight"], "weight_decay": 0.7},
        {"match": "*.k_proj.weight", "kind": "adamw", "options": {"eps": 1e-5}},
        {"match": "*.v_proj.weight", "options": {"momentum": 0.8}},
        {"match": "lm_head.weight", "kind": "muon"},
    ]
    config = load_config(config_of(tmp_path, "muon", optimizer={"groups": groups}), [])
    found = groups_of(config)
    first, second = (found[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert (first["rate"], first["weight_decay"], first["kind"]) == (pytest.approx(0.1), 0.5, "Muon")
    assert (second["rate"], second["weight_decay"]) == (1.0, 0.7)
    assert found["model.norm.weight"]["weight_decay"] == 0.7  # said by name, so norms too
    keys = found["model.layers.0.self_attn.k_proj.weight"]
    assert (keys["kind"], keys["eps"], keys["betas"]) == ("ShardAdamW", 1e-5, (0.9, 0.95))
    assert found["model.layers.0.self_attn.v_proj.weight"]["momentum"] == 0.8
    assert found["lm_head.weight"]["kind"] == "Muon"
    rest = {name: found[name]["kind"] for name in found if "layers.1" in name and "v_proj" not in name}
    by_muon = {name for name, kind in rest.items() if kind == "Muon"}
    assert by_muon == {name for name in rest if is_hidden(name) and "k_proj" not in name}
    assert found["model.embed_tokens.weight"]["kind"] == found["model.layers.0.mlp.gate.weight"]["kind"] == "ShardAdamW"


def test_frozen_group_has_no_gradient_or_state_and_does_not_change(tmp_path: Path) -> None:
    groups = [{"match": ["*embed_tokens*", "model.layers.0.*"], "freeze": True}]
    path = config_of(tmp_path, optimizer={"groups": groups}, train={"steps": 2}, model={"config": EXPERTS})
    assert main(["train", str(path)]) == 0
    saved: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "run" / "checkpoints" / "step_00000002" / "tensors").glob("*.safetensors"):
        saved |= load_file(file)
    with process_group() as process:
        fresh = {name: p.full_tensor() for name, p in sharded(load_config(path, []), process).named_parameters()}
    for name, weight in fresh.items():
        frozen = "embed_tokens" in name or ".layers.0." in name
        assert torch.equal(saved[f"model.{name}"], weight) == frozen, name
        assert (f"optimizer.{name}.exp_avg" not in saved) == frozen, name


def test_tied_head_is_matched_by_its_name(tmp_path: Path) -> None:
    model = {"config": {**EXPERTS, "tie_word_embeddings": True}}
    groups = [{"match": "lm_head.weight", "lr": 1e-3}]
    found = groups_of(load_config(config_of(tmp_path, model=model, optimizer={"groups": groups}), []))
    assert found["model.embed_tokens.weight"]["rate"] == pytest.approx(0.1)


# The average of weights.


@pytest.mark.parametrize("every", [1, 2])
def test_ema_matches_a_plain_loop(every: int, tmp_path: Path) -> None:
    ema = {"decay": 0.8, "every": every}
    config = load_config(config_of(tmp_path, optimizer={"ema": ema}), [])
    with process_group() as process:
        model = sharded(config, process)
        optimizer = build_optimizer(model, config)
        weights = {name: p.detach().full_tensor().double() for name, p in model.named_parameters()}
        for step in range(1, 5):
            give(model, step)
            set_learning_rate(optimizer, LR)
            optimizer.step()
            update_average(optimizer, config.optimizer.ema, step)
            if step % every == 0:
                for name, p in model.named_parameters():
                    weights[name] = 0.8 * weights[name] + 0.2 * p.detach().full_tensor().double()
        for name, p in model.named_parameters():
            torch.testing.assert_close(optimizer.average[p].full_tensor().double(), weights[name], rtol=1e-6, atol=1e-7)


def test_ema_is_exported_by_a_flag(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = config_of(tmp_path, optimizer={"ema": {"decay": 0.5}}, train={"steps": 3}, checkpoint={"every": 2})
    assert main(["train", str(path)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "plain")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "averaged"), "--ema"]) == 0
    saved = load_file(next((tmp_path / "run" / "checkpoints" / "step_00000003" / "tensors").glob("*.safetensors")))
    plain, averaged = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "averaged"))
    name = "model.embed_tokens.weight"
    assert torch.equal(averaged[name], saved[f"ema.{name}"])
    assert torch.equal(plain[name], saved[f"model.{name}"])
    assert not torch.equal(plain[name], averaged[name])
    # A run without one has none to export, and cannot go on as if it had.
    assert main(["train", str(path), "--optimizer.ema", "null", "--log.dir", str(tmp_path / "none")]) == 0
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "no"), "--ema"]) == 2
    checkpoint = str(tmp_path / "none" / "checkpoints" / "step_00000002")
    again = ["--checkpoint.resume", checkpoint, "--log.dir", str(tmp_path / "more")]
    capfd.readouterr()
    assert main(["train", str(path), *again]) == 2
    error = capfd.readouterr().err
    assert ": ema." in error
    assert "`optimizer` section" in error


def test_ema_starts_from_the_weights_of_init_from(tmp_path: Path) -> None:
    path = config_of(tmp_path, train={"steps": 1})
    assert main(["train", str(path)]) == 0
    more = ["--model.init_from", str(tmp_path / "run"), "--optimizer.ema", "{decay: 0.75}"]
    assert main(["train", str(path), *more, "--log.dir", str(tmp_path / "next")]) == 0
    step = Path("checkpoints", "step_00000001", "tensors")
    first, then = (load_file(next((tmp_path / run / step).glob("*.safetensors"))) for run in ("run", "next"))
    averages = [name for name in then if name.startswith("ema.")]
    assert averages
    for name in averages:
        weight = name.replace("ema.", "model.", 1)
        expected = first[weight].lerp(then[weight], 0.25)
        torch.testing.assert_close(then[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor", "own_parts:NoDecay"])
def test_disk_space_check_matches_checkpoint_size(kind: str, tmp_path: Path) -> None:
    frozen = {"match": "model.layers.0.*", "freeze": True}
    optimizer = {"ema": {}, "groups": [frozen], "weight_decay": 0}
    path = config_of(tmp_path, kind, optimizer=optimizer, train={"steps": 1}, model={"config": EXPERTS})
    config = load_config(path, [])
    needed = saved_bytes(build_model(config.model, "fp32"), config)
    assert main(["train", str(path)]) == 0
    tensors = (tmp_path / "run" / "checkpoints" / "step_00000001" / "tensors").iterdir()
    taken = sum(tensor.nbytes for file in tensors for tensor in load_file(file).values())
    assert 0.75 * taken < needed <= taken


# One's own, and mistakes.


def test_example_optimizer_is_short_and_learns(tmp_path: Path) -> None:
    assert len((ROOT / "examples" / "lion" / "lion.py").read_text().splitlines()) < 80
    path = config_of(tmp_path, "lion:Lion", train={"lr": 3e-3, "steps": 12, "schedule": "lion:inverse_root"})
    assert main(["train", str(path)]) == 0
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
    assert [row["lr"] for row in steps] == pytest.approx(
        [3e-3 * min(step / 5, (5 / step) ** 0.5) for step in range(1, 13)]
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kind": "adamx"}, r"optimizer.kind: 'adamx' is not a built-in optimizer .*did you mean adamw"),
    ({"kind": "no_such_package.x:Y"}, r"optimizer.kind: cannot import no_such_package.x:Y: .*expected a torch.optim"),
    (
        {"kind": "own_parts:CountInInts"},
        r"kind: cannot import .*: own_parts has no 'CountInInts'; did you mean Counts",
    ),
    ({"kind": "own_parts:NotAnOptimizer"}, r"own_parts:NotAnOptimizer is not a subclass of torch.optim.*expected"),
    ({"kind": "own_parts:NoRate"}, r"optimizer.options: own_parts:NoRate\(params, speed\) .*'lr'"),
    ({"kind": "own_parts:NoDecay"}, r"^optimizer.kind: own_parts:NoDecay .*weight_decay"),
    ({"kind": "own_parts:CountsInInts"}, r"the state 'count' of own_parts:CountsInInts is a int, which cannot be"),
    ({"kind": "own_parts:KeepsShards"}, r"the state 'shard' of own_parts:KeepsShards is a Tensor, which cannot be"),
    ({"kind": "own_parts:CountsInGroups"}, r"own_parts:CountsInGroups changes 'count' of its parameter groups"),
    ({"kind": "adamw_8bit"}, r"optimizer.kind: adamw_8bit needs the package torchao"),
    ({"kind": "own_parts:Raises"}, r"optimizer.options: own_parts:Raises failed with {}: KeyError: .*inside"),
    ({"kind": "own_parts:RaisesInAStep"}, r"options: own_parts:RaisesInAStep failed with {}: AttributeError: "),
    ({"kind": "own_broken:Sgd"}, r"optimizer.kind: cannot import own_broken:Sgd: NameError: name 'nothing'"),
    ({"options": {"beta": [0.9, 0.9]}}, r"optimizer.options.beta: unknown option of adamw; .*did you mean betas"),
    (
        {"options": {"betas": [0.9]}},
        r"tiny.yaml:\d+: optimizer.options.betas is \[0.9\]; expected list of 2: number >= 0",
    ),
    (
        {"options": {"betas": [0.9, 1.5]}},
        r"optimizer.options.betas is \[0.9, 1.5\]; expected list of 2: number >= 0, < 1",
    ),
    ({"options": {"eps": float("nan")}}, r"optimizer.options.eps is NaN; expected number > 0"),
    ({"options": {"amsgrad": 1}}, r"optimizer.options.amsgrad is 1; expected true or false"),
    ({"options": {"capturable": True}}, r"optimizer.options.capturable: unknown option of adamw"),
    ({"options": {"lr": 0.1}}, r"optimizer.options.lr: .*train.lr"),
    ({"kind": "own_parts:NoDecay", "options": {"lr": 0.1}}, r"optimizer.options.lr: .*train.lr"),
    ({"kind": "muon", "options": {"momentun": 0.9}}, r"momentun: unknown option of muon.*did you mean momentum"),
    ({"kind": "muon", "options": {"dtype": "bf16"}}, r"optimizer.options.dtype: unknown option of muon"),
    ({"kind": "muon", "options": {"split_heads": 2}}, r"optimizer.options.split_heads is 2"),
    ({"kind": "muon", "options": {"ns_steps": 0}}, r"optimizer.options.ns_steps is 0; expected integer >= 1"),
    ({"kind": "adafactor", "options": {"d": 0.5}}, r"optimizer.options.d is 0.5; expected number >= 1"),
    ({"kind": "adafactor", "options": {"eps": 1e-8}}, r"optimizer.options.eps is 1e-08; expected list of 2: number"),
    ({"weight_decay": 1e30}, r"optimizer.weight_decay is 1e\+?30; expected number >= 0, <= 1000"),
    ({"groups": [{"match": "modle.layers.0.*", "lr": 1.0}]}, r"groups.0.match: 'modle.layers.0.\*' matches no .*model"),
    ({"groups": [{"match": ["*norm*", "zzz"], "lr": 1.0}]}, r"optimizer.groups.0.match: 'zzz' matches no parameter"),
    ({"groups": [{"match": "*", "lr": 1.0}, {"match": "*norm*", "lr": 2.0}]}, r"groups.1.match: .* earlier groups"),
    ({"groups": [{"match": "*", "freeze": True}]}, r"freezes every parameter"),
    ({"groups": [{"match": "*", "freeze": True, "lr": 1.0}]}, r"optimizer.groups.0: freeze: lr"),
    ({"groups": [{"match": "*", "kind": "sgd"}]}, r"optimizer.groups.0.kind: 'sgd' is not a built-in optimizer"),
    (
        {"groups": [{"match": "*", "kind": "muon", "options": {"x": 1}}]},
        r"groups.0.options.x: unknown option of muon",
    ),
    ({"groups": [{"match": "*", "options": {"eps": -1.0}}]}, r"optimizer.groups.0.options.eps is -1.0; expected"),
    ({"groups": [{"match": "*", "lr": 1e30}]}, r"optimizer.groups.0.lr is 1e\+?30; expected number > 0, <= 1000"),
    ({"groups": [{"match": "*", "lr": float("nan")}]}, r"optimizer.groups.0.lr is NaN; expected number"),
    ({"groups": [{"match": []}]}, r"optimizer.groups.0.match is \[\]; expected text or list of text"),
    ({"groups": [{"match": "z" * 4000, "lr": 1.0}]}, r"^optimizer.groups.0.match: 'zz.{0,200} matches no parameter"),
    ({"ema": {"decay": 1.0}}, r"optimizer.ema.decay is 1.0; expected number > 0, < 1"),
]


def test_config_options_match_class_arguments() -> None:
    assert set(BUILT_IN) == {*OPTIMIZERS, BF16}
    for kind, options in OPTIMIZERS.items():
        module, _, name = BUILT_IN[kind].target.partition(":")
        if BUILT_IN[kind].package is None:
            taken = set(inspect.signature(getattr(import_module(module), name)).parameters)
            assert set(options) - ({"betas", "eps"} if kind == "muon" else set()) <= taken  # AdamW's, next to Muon


@pytest.mark.parametrize(("optimizer", "says"), WRONG, ids=[json.dumps(wrong) for wrong, _ in WRONG])
def test_invalid_optimizer_raises_one_line(
    optimizer: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnizoo.training.loop import train as run

    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    path = config_of(tmp_path, optimizer=optimizer)
    with pytest.raises(UserError, match=says) as caught:
        run(load_config(path, []))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("cosin", r"train.schedule: 'cosin' is not a built-in schedule .*did you mean cosine"),
        (
            "own_parts:straigt",
            r"train.schedule: cannot import .*: own_parts has no 'straigt'; did you mean straight\?.*expected a func",
        ),
        ("own_parts:NOT_CALLABLE", r"train.schedule: own_parts:NOT_CALLABLE is a int"),
        ("own_parts:no_step", r"train.schedule: own_parts:no_step\(train\)"),
        ("own_parts:negative", r"train.schedule: own_parts:negative returned -1.0 at step 1"),
        ("own_parts:divides", r"train.schedule: own_parts:divides failed at step 1: ZeroDivisionError"),
        ("own_broken:straight", r"train.schedule: cannot import own_broken:straight: NameError"),
        ("builtins:max", r"train.schedule: builtins:max "),
    ],
)
def test_invalid_schedule_raises(schedule: str, says: str, tmp_path: Path) -> None:
    from omnizoo.training.loop import train as run

    with pytest.raises(UserError, match=says):
        run(load_config(config_of(tmp_path, train={"schedule": schedule}), []))


def test_resume_with_another_optimizer_raises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = config_of(tmp_path, train={"steps": 1})
    assert main(["train", str(path)]) == 0
    capfd.readouterr()
    assert main(["train", str(path), "--optimizer.kind", "muon", "--train.steps", "2"]) == 2
    error = capfd.readouterr().err
    assert ": optimizer." in error
    assert "`optimizer` section" in error


# torchao is optional, and compiles for minutes on a CPU: its state is tried without the compiler.


def eight_bits(process: Process, folder: Path) -> None:
    torch.compile = lambda function, **options: function
    args = [folder / "tiny.yaml", "--checkpoint.every", str(SAVED), "--checkpoint.keep", "9"]
    resumed = ["--checkpoint.resume", folder / "2" / "checkpoints" / f"step_{SAVED:08d}"]
    own, again = folder / str(process.world_size), folder / f"{process.world_size} again"
    assert train_in_this_world([*args, "--log.dir", own]) == 0
    assert train_in_this_world([*args, "--log.dir", again, *resumed]) == 0


@pytest.mark.slow
def test_8_bit_state_resumes_exactly_on_any_layout(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    config_of(tmp_path, "adamw_8bit", train={"lr": 3e-3})
    for world in (2, 4):
        result = run_on_ranks(eight_bits, world, tmp_path)
        assert result.code == 0, result.stdout + result.stderr
    whole, again, other, alone = (
        {row["step"]: row["loss"] for row in read_steps(tmp_path / name)} for name in ("2", "2 again", "4 again", "4")
    )
    assert again == {step: whole[step] for step in range(SAVED + 1, RUN_STEPS + 1)}
    assert other == pytest.approx(again, rel=1e-3)  # 8-bit blocks are of shards
    assert alone == pytest.approx(whole, rel=1e-3)
