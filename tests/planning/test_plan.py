"""`omnizoo plan` predicts memory and collectives of real runs, and every host sync is in the budget."""

import json
import multiprocessing
import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from dry_runs import Case, run_dry, run_real
from processes import run_omnizoo, run_on_ranks, start_server
from sync_budget import ALLOWED

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.planning.devices import read_device
from omnizoo.planning.op_counter import OpCounter, flops_of, part_of

pytestmark = pytest.mark.timeout(1800)  # plans of published sizes take long on a busy machine
ROOT = Path(__file__).parents[2]
DENSE, MOE = "examples/text_tiny.yaml", "examples/qwen3_moe_tiny.yaml"
OMNI, LORA = "examples/published/qwen3_omni.yaml", "examples/lora_tiny.yaml"
SMALL = ["--model.config.num_hidden_layers", "2", "--evaluation.every", "0"]


def case(path: str, batch: int, **parallel: Any) -> Case:
    # The defaults of these keys depend on the device and its memory.
    parallel = {"reduce_each_micro_batch": "false", "reshard_after_forward": "true"} | parallel
    settings = [word for key, value in parallel.items() for word in (f"--parallel.{key}", str(value))]
    small = SMALL if path != OMNI else ["--model.config.text_config.num_hidden_layers", "2"]
    return str(ROOT / path), [*small, "--train.packs_per_step", str(batch), "--train.precision", "fp32", *settings]


def with_nf4_base(plain: Case) -> Case:
    """Return the case with a 4-bit quantized base."""
    path, settings = plain
    return path, [*settings, "--model.adapter.base", "nf4"]


def preferences(path: str, batch: int, kind: str, **parallel: Any) -> Case:
    """Return a case with an adapter, whose base model runs before each micro-batch, and for kto before the step."""
    source = ROOT / "examples/data/tiny/preferences.jsonl"
    settings = ["--train.losses", f"[{{kind: {kind}}}]", "--data.sources", f"[{{path: {source}}}]"]
    config, overrides = case(path, batch, **parallel)
    return config, [*overrides, *settings, "--model.adapter", "{rank: 4, targets: [all-linear]}"]


ONE = {
    "dense": case(DENSE, 2),
    "dense, selective": case(DENSE, 1, recompute="selective"),
    "experts, tiled": case(MOE, 1, recompute="full", tile_tokens=64),
    "omni": case(OMNI, 1),
    "adapter, base in 4 bits": with_nf4_base(case(LORA, 2)),
}
FOUR = {
    "ring x ulysses": case(DENSE, 1, ring=2, ulysses=2),
    "experts sharded, ulysses": case(MOE, 2, ulysses=2, recompute="full"),
    "omni, ulysses": case(OMNI, 2, ulysses=2),
}
# The features of the cases above, one at a time.
SEPARATE_ONE = {
    "dense, recomputing": case(DENSE, 1, recompute="full"),
    "dense, tiled": case(DENSE, 1, tile_tokens=64),
    "experts": case(MOE, 2),
    "experts, recomputing": case(MOE, 1, recompute="full"),
}
SEPARATE = {
    "fsdp": case(DENSE, 8),
    "fsdp, weights kept": case(MOE, 8, reshard_after_forward="false"),
    "ulysses only, selective": case(DENSE, 1, ulysses=4, recompute="selective"),
    "hsdp": case(DENSE, 4, dp_replicate=2),
    "hsdp, reducing each": case(DENSE, 8, dp_replicate=2, reduce_each_micro_batch="true"),
    "adapter, base in 4 bits": with_nf4_base(case(LORA, 2, ulysses=2)),
    "ulysses": case(DENSE, 2, ulysses=2),
    "ring": case(DENSE, 2, ring=2),
    "experts sharded": case(MOE, 4),
    "omni, fsdp": case(OMNI, 4),
}
# A plan cannot know which experts are chosen, so only the number of all-to-alls is compared.
ROUTED = {"experts spread, tiled": case(MOE, 4, ep=2, tile_tokens=64)}
# A plan runs three of many micro-batches, and packs differ in length.
MANY = {"preferences": preferences(DENSE, 8, "kto", ulysses=2)}
Found = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def both(cases: dict[str, Case], world: int, folder: Path) -> Found:
    with chdir(ROOT):  # paths in the configs are relative to it
        result = run_on_ranks(run_real, world, list(cases.values()), folder)
        assert result.code == 0, result.stderr
        planned = dry(list(cases.values()), world, folder)
    real = json.loads((folder / "real.json").read_text())
    return dict(zip(cases, zip(real, planned, strict=True), strict=True))


def dry(cases: list[Case], world: int, folder: Path) -> list[dict[str, Any]]:
    """Plan the cases in a separate process, because a plan registers another device in torch."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=run_dry, args=(cases, world, folder))
    process.start()
    process.join(900)
    assert process.exitcode == 0
    found: list[dict[str, Any]] = json.loads((folder / "dry.json").read_text())
    return found


def host_syncs(result: dict[str, Any]) -> set[tuple[str, str]]:
    """Return file and function of every host sync."""
    return {(where.rpartition(":")[0] or where, function) for where, function, *_ in result["syncs"]}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(ONE, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(FOUR | ROUTED | MANY, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(SEPARATE, 4, tmp_path_factory.mktemp("separate"))


@pytest.mark.parametrize("name", ONE)
def test_peak_in_one_process_matches_a_real_run(one: Found, name: str) -> None:
    real, dry = one[name]
    assert dry["peak"] == pytest.approx(real["peak"], rel=0.01)
    assert dry["bytes"] == real["bytes"] == {}


@pytest.fixture(scope="module")
def separate_one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return both(SEPARATE_ONE, 1, tmp_path_factory.mktemp("separate_one"))


@pytest.mark.long
@pytest.mark.parametrize("name", SEPARATE_ONE)
def test_peak_of_one_feature_matches_a_real_run(separate_one: Found, name: str) -> None:
    test_peak_in_one_process_matches_a_real_run(separate_one, name)


@pytest.mark.long
@pytest.mark.parametrize("name", SEPARATE)
def test_separate_layouts_are_planned_as_they_run(separate: Found, name: str) -> None:
    test_peak_on_several_ranks_matches_a_real_run(separate, name)
    test_planned_collectives_match_a_real_run(separate, name)


@pytest.mark.parametrize("name", FOUR)
def test_peak_on_several_ranks_matches_a_real_run(four: Found, name: str) -> None:
    real, dry = four[name]
    assert dry["peak"] == pytest.approx(real["peak"], rel=0.02)


@pytest.mark.parametrize("name", FOUR)
def test_planned_collectives_match_a_real_run(four: Found, name: str) -> None:
    real, dry = four[name]
    assert dry["calls"] == real["calls"]
    assert dry["bytes"] == real["bytes"]


def test_collectives_are_attributed_to_their_axis(four: Found) -> None:
    layers, ring = 2, 2
    sequence, experts, omni = (four[name][1]["calls"] for name in ("ring x ulysses", *ROUTED, "omni, ulysses"))
    # Queries, keys, values and the output of each layer, in forward and in backward.
    assert sequence["all-to-all ulysses"] == layers * 2 * 4
    # Keys and values move on ring - 1 times in each direction; their gradients return home.
    assert sequence["send ring"] == layers * (2 * (ring - 1) + ring)
    assert experts["all-to-all ep"] > 0
    assert omni["all-to-all world"] > 0
    for name in FOUR:
        assert four[name][1]["calls"]["all-reduce world"] == 1  # loss sums and gradient norm


@pytest.mark.parametrize("name", ROUTED)
def test_number_of_expert_all_to_alls_matches_a_real_run(four: Found, name: str) -> None:
    real, dry = four[name]
    assert dry["calls"] == real["calls"]


@pytest.mark.parametrize("name", MANY)
def test_omitted_micro_batches_are_counted(four: Found, name: str) -> None:
    real, dry = four[name]
    assert dry["peak"] == pytest.approx(real["peak"], rel=0.02)
    assert dry["calls"] == real["calls"]
    assert dry["bytes"] == pytest.approx(real["bytes"], rel=0.01)


# The default configs of most families in transformers have published sizes. Layers are equal, so two are enough.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"num_attention_heads": 8},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
    # Recurrent layers, and at least one attention layer if the family has any.
    "nemotron_h": {"num_hidden_layers": None},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "kimi_linear": {"num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {},
    "olmo_hybrid": {"num_hidden_layers": 4},
    "mamba2": {},
}
# Families whose layers also occur in the tiny configs above or in other families here.
PLAIN = ("llama", "qwen3_moe", "qwen3_vl_30b_a3b")
HYBRIDS = ("qwen3_5_moe_text", "kimi_linear", "bamba", "granitemoehybrid", "falcon_h1", "olmo_hybrid", "mamba2")
WITHOUT_EXPERTS = ("llama", "gemma3_text", "bamba", "falcon_h1", "olmo_hybrid", "mamba2")
WITHOUT_FUSED_ATTENTION = ("mamba2", "kimi_linear")  # no attention; keys wider than values, which no kernel supports
LAYOUTS = {8: {"ulysses": 4, "ep": 4}, 128: {"ulysses": 4, "ring": 2, "ep": 8, "dp_replicate": 2}}
FEW = (
    "gpt_oss",
    "deepseek_v3",
    "qwen3_omni_32k",
    "nemotron_h",
    "qwen3_5_moe_text",
)  # at the larger world size, to save time
OF_MEDIA = ("qwen3_vl_30b_a3b", "qwen3_omni_32k")


Traced = dict[str, dict[str, Any]]  # results by model name


def published(folder: Path, world: int) -> dict[str, Case]:
    cases = {}
    for family, settings in FAMILIES.items():
        layout = {axis: size for axis, size in LAYOUTS[world].items() if axis != "ep" or family not in WITHOUT_EXPERTS}
        sizes = {"model_type": family, "num_hidden_layers": 2} | settings
        config = {
            "model": {"config": {key: value for key, value in sizes.items() if value is not None}},
            "data": {"pack_tokens": 4096},
            "parallel": {"recompute": "selective"} | layout,
            "train": {"steps": 1, "packs_per_step": 32, "precision": "bf16"},
            "log": {"dir": str(folder)},
        }
        path = folder / f"{family}.yaml"
        path.write_text(yaml.safe_dump(config))
        cases[family] = (str(path), [])
    for name in OF_MEDIA:
        few = ["--model.config.text_config.num_hidden_layers", "3", "--model.config.vision_config.depth", "3"]
        few += ["--model.config.vision_config.deepstack_visual_indexes", "[0, 1, 2]", "--parallel.dp_shard", "-1"]
        few += ["--model.config.audio_config.encoder_layers", "2"] if "omni" in name else []
        cases[name] = (str(ROOT / "examples" / "gpu" / f"{name}.yaml"), few)
    return cases


@pytest.fixture(
    scope="module",
    params=["8", *(pytest.param(name, marks=pytest.mark.long) for name in ("8, plain", "8, hybrids", "128"))],
)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    world, folder = int(request.param.partition(",")[0]), tmp_path_factory.mktemp("published")
    cases = published(folder, world)
    others = [name for name in cases if name not in (*PLAIN, *HYBRIDS)]
    names = {"8": others, "8, plain": PLAIN, "8, hybrids": HYBRIDS, "128": FEW}[request.param]
    # DTensor caches groups by mesh shape, so replicas of a second model in the same process would find no groups.
    batches = [names] if world == 8 else [[name] for name in names]
    results: Traced = {}
    for batch in batches:
        results |= zip(batch, dry([cases[name] for name in batch], world, folder), strict=True)
    return results


def test_models_of_published_sizes_are_traced(traced: Traced) -> None:
    assert {name: result["error"] for name, result in traced.items() if "error" in result} == {}
    assert all(result["peak"] > 2**30 for result in traced.values())
    assert all("data.sources" in result["data"] for result in traced.values())


def test_published_sizes_compute_in_bf16_with_kernels_of_accelerators(traced: Traced) -> None:
    for family, result in traced.items():
        flops: dict[str, int] = {}
        for name, dtype, _module, _calls, size in result["kernels"]:
            flops[dtype] = flops.get(dtype, 0) + size
            if "attention" in name or "attn" in name:
                assert dtype == "bfloat16", (family, name)
        assert flops["bfloat16"] > 0.98 * sum(flops.values()), (family, flops)  # the rest: routers and their losses
        attends = any("attention" in name or "attn" in name for name, *_ in result["kernels"])
        assert attends == (family not in WITHOUT_FUSED_ATTENTION), family
        experts = family not in WITHOUT_EXPERTS
        assert any(name == "_grouped_mm" for name, *_ in result["kernels"]) == experts, family


def test_every_host_sync_is_in_the_budget(one: Found, four: Found, traced: Traced) -> None:
    planned = [dry for _, dry in (*one.values(), *four.values())] + list(traced.values())
    found = {sync for result in planned for sync in host_syncs(result)}
    assert found - set(ALLOWED) == set()
    assert set(ALLOWED) - found == set()  # remove entries that no run has any more


def test_untraceable_operator_is_named(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / DENSE).read_text())
    sizes = {"vocab_size": 512, "width": 16, "heads": 2, "layers": 1}
    config["model"] = {"module": "untraceable_module:Choosy", "config": sizes}
    config["data"] = {"sources": [{"path": "nowhere.jsonl"}], "pack_tokens": 64}
    config["train"] = {"steps": 1, "packs_per_step": 1}
    del config["evaluation"]
    (tmp_path / "choosy.yaml").write_text(yaml.safe_dump(config))
    config["model"]["module"] = "own_module:TinyModel"
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(config))
    choosy, plain = dry([(str(tmp_path / f"{name}.yaml"), []) for name in ("choosy", "plain")], 1, tmp_path)
    assert "aten.index.Tensor" in choosy["error"]
    assert "untraceable_module.py:12" in choosy["error"]
    assert "one text of 64 tokens" in plain["data"]
    assert "model.tokenizer" in plain["data"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--device", "h1000"], "--device: 'h1000'"),
        (["--world", "6", "--parallel.ulysses", "4"], "parallel.ulysses: 4"),
        (["--world", "0"], "--world: 0"),
        (["--rank", "8"], "--rank: 8"),
        (["--imbalance", "0"], "--imbalance: 0"),
        (["--train.packs_per_step", "3"], "train.packs_per_step: 3 "),
        (["--train.lr", "fast"], "train.lr"),
    ],
)
def test_invalid_arguments_of_plan_print_one_line(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(ROOT / DENSE), *args]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory_gb: 0", "memory_gb is 0"),
        ("memory_gb: 80\nper_node: 2.5", r"per_node is 2\.5"),
        ("memory: 80", "unknown keys memory"),
        ("per_node: 8", "no memory_gb"),
        ("{", "cannot read"),
        ("80", "is not a mapping"),
    ],
)
def test_invalid_device_file_raises(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "device.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        read_device(str(tmp_path / "device.yaml"))


def test_device_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "device.yaml").write_text("memory_gb: 96\nper_node: 4")
    device = read_device(str(tmp_path / "device.yaml"))
    assert (device.memory_gb, device.per_node) == (96, 4)


def test_step_that_does_not_fit_prints_advice(tmp_path: Path) -> None:
    """The command prints one JSON object and writes an HTML page."""
    links = "inside_gb_per_s: 100\nacross_gb_per_s: 10"
    speeds = f"bf16_tflops: 100\nfp32_tflops: 10\nmemory_gb_per_s: 1000\n{links}"
    (tmp_path / "device.yaml").write_text(f"memory_gb: 0.008\nper_node: 1\n{speeds}")
    args = [*SMALL, "--world", "2", "--device", tmp_path / "device.yaml", "--json", "--html", tmp_path / "plan.html"]
    with chdir(ROOT):
        result = run_omnizoo(["plan", ROOT / DENSE, *args, "--train.packs_per_step", "2", "--data.pack_tokens", "256"])
    assert result.code == 1, result.stderr
    plan = json.loads(result.stdout)
    assert plan["fits"] is False
    assert plan["peak_memory_gb"] == pytest.approx(sum(plan["memory"].values()))
    first = plan["advice"][0]
    assert first["peak_memory_gb"] < plan["peak_memory_gb"]
    assert {"op", "axis", "bytes", "count", "inside_node"} <= set(plan["collectives"][0])
    assert not plan["collectives"][0]["inside_node"]
    assert plan["flops_per_step"] > 0
    expected = plan["expected"]
    assert expected["seconds_per_step"] == pytest.approx(sum(expected["seconds"].values()))
    assert expected["tokens_per_second_per_device"] * expected["seconds_per_step"] == pytest.approx(
        plan["tokens_per_step"] / plan["world"]
    )
    assert "published runs of dense models, error" in expected["prediction"]
    assert all(sync["where"] and sync["count"] for sync in plan["host_syncs"])
    page = (tmp_path / "plan.html").read_text()
    chart = json.loads(re.search("data-chart='(.*?)'", page)[1])
    stacked = [sum(levels) for levels in zip(*(curve["values"] for curve in chart["curves"]), strict=True)]
    assert max(stacked) == pytest.approx(plan["peak_memory_gb"], rel=1e-3)
    assert "does not fit" in page
    assert "http" not in page


def test_matmul_flops_match_theory() -> None:
    a, b = torch.empty(6, 5), torch.empty(5, 4)
    assert flops_of("mm", a, b) == 2 * 6 * 5 * 4
    assert flops_of("bmm", torch.empty(3, 6, 5), torch.empty(3, 5, 4)) == 3 * 2 * 6 * 5 * 4
    assert flops_of("_grouped_mm", a, torch.empty(3, 5, 4)) == 2 * 6 * 5 * 4  # six rows with one expert each
    assert flops_of("_grouped_mm", a, torch.empty(5, 4)) == 2 * 6 * 5 * 4
    work = OpCounter(torch.device("cpu"))
    for name, args in (("mm", (a, b)), ("addmm", (torch.empty(4), a, b)), ("add", (a, a))):
        work.see(getattr(torch.ops.aten, name).default if name != "add" else torch.ops.aten.add.Tensor, args, "m", "")
    assert sum(work.flops.values()) == 2 * 2 * 6 * 5 * 4
    assert part_of("model.layers.*.mlp.experts.act_fn") == "model.layers.*.mlp"
    assert part_of("lm_head") == "lm_head"
