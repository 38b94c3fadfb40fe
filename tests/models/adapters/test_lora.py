"""Adapters: same results as PEFT on every layout, files that PEFT reads, bitwise resume."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapter_cases import EXPERTS, MOE, ROOT, logits_of, publish
from omni import SENSOR, write_omni_config
from own_module import TinyModel
from peft import LoraConfig, PeftModel, get_peft_model
from processes import run_omnizoo, run_on_ranks, train_in_this_world
from safetensors.torch import load_file
from tiny import model_config, read_steps, write_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import omnizoo
from omnizoo.checkpoint.tensor_files import on_meta
from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import AdapterSettings, ModelSection
from omnizoo.models.adapters.lora import attached, merge, set_magnitudes, settings_of
from omnizoo.models.adapters.peft_files import INITS, adapter_settings, peft_tensors, read_factors, write_folder
from omnizoo.models.build import build_model
from omnizoo.models.interfaces.attention import packed_inputs
from omnizoo.models.interfaces.experts import use_dispatched
from omnizoo.models.weights.random_init import initial_weights
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import load_trial, parse, prepare

PACKED = {"position_ids": torch.arange(24)[None]} | packed_inputs(torch.tensor([0, 24], dtype=torch.int32), 24)


def ours(fields: dict[str, Any], **settings: Any) -> nn.Module:
    """Build a model with random weights and an adapter without zero matrices, in one process."""
    torch.manual_seed(0)
    adapter = AdapterSettings(**({"rank": 4, "alpha": 6.0, "init": "random"} | settings))
    model = build_model(ModelSection(config=fields, adapter=adapter), "fp32", "cpu")
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    set_magnitudes(model, attached(model))
    if "experts" in str([name for name, _ in model.named_modules()]):
        use_dispatched(model)
    return model


def theirs(model: nn.Module, fields: dict[str, Any]) -> nn.Module:
    """Build the same model with PEFT, and copy the weights of base and adapter."""
    found = attached(model)
    settings = found.settings
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager")
    state = model.state_dict()
    base.load_state_dict({name: tensor for name, tensor in state.items() if name not in found.started}, strict=False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        use_dora=settings.kind == "dora",
        use_rslora=settings.kind == "rslora",
        target_modules=list(found.modules),
        target_parameters=list(found.experts) or None,
        modules_to_save=list(found.saved) or None,
        init_lora_weights=INITS[settings.init],
    )
    return get_peft_model(base, config)


CASES = {
    "lora": ("qwen3", {}),
    "rslora": ("qwen3", {"kind": "rslora"}),
    "dora": ("qwen3", {"kind": "dora"}),
    "biases": ("gpt_oss", {"kind": "dora"}),
    "embedding and head": ("llama", {"targets": ["all-linear", "embed_tokens", "lm_head"]}),
    "whole modules": ("llama", {"targets": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]}),
    "experts": (MOE, {"targets": ["q_proj", *EXPERTS]}),
    "one matrix of the experts": (MOE, {"targets": ["experts.down_proj"]}),
    "experts with biases, the other way round": ("gpt_oss", {"targets": EXPERTS}),
}


def name_in_file(name: str) -> str:
    """Return the name under which PEFT saves one of its parameters."""
    name = name.replace(".modules_to_save", "").replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


@pytest.mark.parametrize("case", CASES)
def test_adapter_loss_gradients_and_files_match_peft(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    fields = model_config(family) if isinstance(family, str) else family
    model = ours(fields, **settings)
    found = attached(model)
    trained = {name: model.get_parameter(name) for name in found.trained}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == found.trained
    write_folder(tmp_path, found, {name: p.detach() for name, p in trained.items()}, None, "")
    again = replace(found, settings=adapter_settings(AdapterSettings(path=str(tmp_path))))
    assert all(torch.equal(value, trained[name]) for name, value in read_factors(again))

    other = theirs(model, fields)
    loaded = other.load_adapter(tmp_path, "default", is_trainable=True)
    assert not loaded.unexpected_keys
    ids = torch.randint(0, 512, (1, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in (model.eval(), other.eval()):
        logits = each(input_ids=ids, **(PACKED if each is model else {})).logits
        losses.append(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    expected = {name_in_file(name): p.grad for name, p in other.named_parameters() if p.requires_grad}
    (tmp_path / "gradients").mkdir()
    write_folder(tmp_path / "gradients", found, {name: p.grad for name, p in trained.items()}, None, "")
    gradients = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert set(gradients) == set(expected)
    for name, grad in gradients.items():
        assert grad.norm() > 0, name
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


GATE_UP_DOWN = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
EXPORTED = {
    "patterns": (
        "qwen3",
        {"rank_pattern": {"q_proj": 2, r"re:.*\.1\.mlp\..*": 3}, "alpha_pattern": {"down_proj": 1.5}},
    ),
    "regular expression": ("qwen3", {"targets": [r"re:model\.layers\.0\..*(q|v)_proj"], "kind": "dora"}),
    "biases of targets": ("gpt_oss", {"targets": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "all biases": ("gpt_oss", {"targets": ["q_proj"], "bias": "all"}),
    "gate projections": (MOE, {"targets": ["experts.gate_proj"]}),
    "gate and up projections": (
        MOE,
        {
            "targets": GATE_UP_DOWN,
            "rank_pattern": {"experts.up_proj": 2},
            "alpha_pattern": {"experts.gate_proj": 2.0},
            "kind": "rslora",
        },
    ),
    "interleaved projections": ("gpt_oss", {"targets": ["experts.up_proj", "experts.down_proj"]}),
    "shared matrices": (MOE, {"targets": ["q_proj", *EXPERTS], "experts": "shared"}),
    "shared matrices of projections": ("gpt_oss", {"targets": GATE_UP_DOWN, "experts": "shared"}),
}


@pytest.mark.parametrize("case", EXPORTED)
def test_exported_adapter_in_peft_has_same_loss_and_gradients(case: str, tmp_path: Path) -> None:
    """PEFT has more parameters, of which ours are a linear function, so its gradients are transformed to ours."""
    family, settings = EXPORTED[case]
    fields = model_config(family) if isinstance(family, str) else family
    model = ours(fields, **settings)
    found = attached(model)
    state = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in found.trained}
    write_folder(tmp_path, found, {name: tensor.detach() for name, tensor in state.items()}, None, "")
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager")
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in found.started}
    base.load_state_dict({name: torch.zeros_like(w) if name in state else w for name, w in weights.items()})
    other = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)

    ids = torch.randint(0, 512, (1, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in (model.eval(), other.eval()):
        logits = each(input_ids=ids, **(PACKED if each is model else {})).logits
        losses.append(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)

    _, tensors = peft_tensors(found, state)
    gradients = {name_in_file(name): p.grad for name, p in other.named_parameters() if p.requires_grad}
    assert tensors.keys() <= gradients.keys()
    product = sum((tensor * gradients[name]).sum() for name, tensor in tensors.items())
    expected = dict(zip(state, torch.autograd.grad(product, list(state.values())), strict=True))
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        found_gradient = model.get_parameter(name).grad
        assert (found_gradient - gradient).norm() <= 1e-5 * gradient.norm(), name

    merge(model, weights, found, {name: tensor.detach() for name, tensor in state.items()})
    merged = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager")
    merged.load_state_dict(weights)
    logits = merged.eval()(input_ids=ids).logits
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=0)

    again = attached(ours(fields, path=str(tmp_path), rank=16, alpha=32.0, init="kaiming"))
    assert {settings_of(again.settings, name).rank for name in again.modules} == {
        settings_of(found.settings, name).rank for name in found.modules
    }


STEPS = 6
VALUES = ("loss", "grad_norm", "tokens_seen")


def train_and_resume(process: Process, config: Path, run: Path, again: Path) -> None:
    """Train a run, and resume a copy of it from step 3."""
    assert train_in_this_world([config, "--log.dir", run]) == 0
    if process.rank == 0:
        shutil.copytree(run, again)
        shutil.rmtree(again / "checkpoints" / f"step_{STEPS:08d}")
    torch.distributed.barrier()
    assert train_in_this_world([config, "--log.dir", again]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train adapters of attention and experts of a published model on two expert-parallel ranks."""
    root = tmp_path_factory.mktemp("adapter")
    adapter = {"rank": 4, "alpha": 8.0, "targets": ["all-linear", *EXPERTS]}
    model = {"config": None, "tokenizer": None, "path": str(publish(root / "base")), "adapter": adapter}
    config = write_config(
        root,
        model=model,
        train={"steps": STEPS, "packs_per_step": 4, "warmup_steps": 2, "lr": 1e-2},
        parallel={"ulysses": 2, "ep": 2},
        checkpoint={"every": 3},
    )
    result = run_on_ranks(train_and_resume, 2, config, root / "run", root / "again")
    assert result.code == 0, result.stdout + result.stderr
    return root


def values(run: Path) -> list[list[float]]:
    rows = read_steps(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [[row[key] for key in VALUES] for row in rows]


@pytest.mark.slow
def test_adapter_resume_is_bitwise_and_checkpoint_has_no_base(trained: Path) -> None:
    assert values(trained / "again") == values(trained / "run")
    step = trained / "run" / "checkpoints" / f"step_{STEPS:08d}"
    saved = on_meta(step / "tensors")
    assert all("lora_" in name for name in saved)
    kinds = Counter(name.split(".")[0] for name in saved)
    assert kinds["model"] == 2 * (4 * 2 + 2 * 2)  # two layers of four linear layers and two matrices of experts
    assert kinds["optimizer"] == 3 * kinds["model"]


@pytest.mark.slow
def test_adapter_resume_on_other_layout_has_same_losses(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    alone = ["--parallel.ulysses", "1", "--parallel.ep", "1", "--log.dir", str(run)]
    assert main(["train", str(trained / "tiny.yaml"), *alone]) == 0
    for ours, expected in zip(values(run), values(trained / "run"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_peft_loads_export_and_merged_logits_match(trained: Path, tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert main(["export", str(trained / "run"), str(adapter)]) == 0
    assert main(["export", str(trained / "run"), str(merged), "--merge"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(trained / "base")
    before = logits_of(plain)
    by_peft = logits_of(PeftModel.from_pretrained(plain, adapter))
    assert (by_peft - before).norm() > 1e-2 * before.norm()
    by_us = logits_of(AutoModelForCausalLM.from_pretrained(merged))
    assert (by_us - by_peft).norm() <= 1e-5 * by_peft.norm()

    # Another run can start from the folder, with the same result as from the checkpoint.
    first = {}
    for name, args in {
        "folder": ["--model.adapter", json.dumps({"path": str(adapter)})],
        "checkpoint": ["--model.init_from", str(trained / "run")],
    }.items():
        one = ["--train.steps", "1", "--parallel.ulysses", "1", "--parallel.ep", "1", "--log.dir", str(tmp_path / name)]
        assert main(["train", str(trained / "tiny.yaml"), *one, *args]) == 0
        first[name] = [read_steps(tmp_path / name)[0][key] for key in VALUES]
    assert first["folder"] == first["checkpoint"]
    assert first["folder"][0] < values(trained / "run")[0][0]


@pytest.mark.slow
def test_merge_reinitializes_random_base_from_seed(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        model={"config": model_config("llama"), "adapter": {"kind": "dora", "rank": 4, "init": "random"}},
        train={"steps": 1, "packs_per_step": 1, "warmup_steps": 0},
        optimizer={"ema": {"decay": 0.5}},
    )
    assert main(["train", str(config)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "average"), "--ema"]) == 0
    last, average = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "average"))
    assert all(not torch.equal(average[name], tensor) for name, tensor in last.items())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config("llama")))
    construct = partial(build_model, ModelSection(config=model_config("llama")), "fp32")
    base.load_state_dict(dict(initial_weights(construct, load_config(config, []).train.seed, set(base.state_dict()))))
    by_peft = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    by_us = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (by_us - by_peft).norm() <= 1e-5 * by_peft.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [  # tests/training/losses/test_preference.py has the same config on the others
        "dp2.uly2.ep4",
        *(pytest.param(layout, marks=pytest.mark.long) for layout in ("rep2.dp2", "uly2.ring2")),
    ],
)
def test_layouts_agree_with_one_process(layout: str, prepared: Path) -> None:
    verdict = verdict_of(prepared, parse(layout, 4))
    assert verdict.passed, verdict.reason


@pytest.mark.slow
def test_plan_counts_gradients_and_optimizer_state_of_adapter_only() -> None:
    """Encoders are completely frozen: FSDP gathers weights for a backward pass that they do not have."""
    args = ["plan", ROOT / "examples/gpu/qwen3_omni_32k.yaml", "--world", "8", "--train.packs_per_step", "8", "--json"]
    args += ["--model.config.text_config.num_hidden_layers", "2", "--model.config.vision_config.depth", "2"]
    args += ["--model.config.vision_config.deepstack_visual_indexes", "[0]"]
    args += ["--model.config.audio_config.encoder_layers", "2"]
    result = run_omnizoo([*args, "--model.adapter", "{rank: 16}"])
    assert result.code == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]
    assert 0 < memory["optimizer"] < 0.02 * memory["weights"]
    assert memory["gradients"] < 0.02 * memory["weights"]


@pytest.mark.slow
def test_adapter_example_trains_and_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = ["--train.steps", "2", "--evaluation.every", "0", "--data.pack_tokens", "128"]
    assert main(["train", "examples/lora_tiny.yaml", *short, "--log.dir", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    assert logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).isfinite().all()


def test_new_voice_demo_trains_under_two_percent_of_weights() -> None:
    demo, voice = (
        yaml.safe_load((ROOT / "examples/digits" / f"{name}.yaml").read_text()) for name in ("digits", "new_voice")
    )
    del demo["model"]["modalities"]["image"]["decoder"]  # the demo creates its folder
    model = build_model(ModelSection(**demo["model"], adapter=voice["model"]["adapter"]), "fp32")
    found = attached(model)
    assert not found.generates  # so PEFT must not require transformers' `generate`
    trained = sum(model.get_parameter(name).numel() for name in found.trained)
    assert 0.015 < trained / sum(p.numel() for p in model.parameters()) < 0.02
    assert {name.split(".")[0] for name in found.modules} == {"foundation", "encoders"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    prepare(load_config(ROOT / "examples/lora_tiny.yaml", []), 4, "dp2.uly2.ep4", "fp32", folder)
    return folder


# Mistakes


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`omnizoo train` with this adapter must exit with code 2 and one error line, and create no run folder."""
    config = write_config(tmp_path, train={"steps": 1, "packs_per_step": 1})

    def fails(adapter: dict[str, Any], *args: str) -> str:
        assert main(["train", str(config), "--model.adapter", json.dumps(adapter), *args]) == 2
        err = capsys.readouterr().err
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert "Traceback" not in err
        assert not (tmp_path / "run").exists()
        return lines[0]

    return fails


def test_invalid_adapter_settings_print_one_line(fails: Callable[..., str]) -> None:
    line = fails({"targets": ["q_pro"]})
    assert "model.adapter.targets.0: 'q_pro' matches no linear layer" in line
    assert "q_proj" in line
    assert "model.adapter.targets.1: 'layers.*.q_proj' matches no" in fails({"targets": ["q_proj", "layers.*.q_proj"]})
    assert "model.adapter.exclude.0: 'k_proj' matches no target" in fails(
        {"targets": ["q_proj"], "exclude": ["k_proj"]}
    )
    assert "model.adapter.exclude: ['q_proj']" in fails({"targets": ["q_proj"], "exclude": ["q_proj"]})
    line = fails({"rank": 17, "targets": ["k_proj"]})
    assert "model.adapter.rank: 17 " in line
    assert "model.layers.0.self_attn.k_proj (16 x 32)" in line
    line = fails({"rank": 4, "modules_to_save": ["lm_hea"]})
    assert "model.adapter.modules_to_save.0: 'lm_hea' " in line
    assert "lm_head" in line
    assert "lm_head.weight is tied to model.embed_tokens.weight" in fails({"rank": 4, "modules_to_save": ["lm_head"]})
    assert "model.adapter.modules_to_save: model.layers.0.self_attn.q_proj " in fails(
        {"rank": 4, "modules_to_save": ["model.layers.0.self_attn"]}
    )
    line = fails({"rank": 4, "kind": "dora", "targets": ["embed_tokens"]})
    assert "model.adapter.kind: dora" in line
    assert "model.embed_tokens" in line
    assert "model.adapter.dropout: 0.1 " in fails(
        {"rank": 4, "dropout": 0.1, "targets": EXPERTS}, "--model.config", json.dumps(MOE)
    )
    assert "model.adapter.rank" in fails({"rank": 0})
    assert "model.adapter.rank_pattern.0: 'v_prj'" in fails({"rank": 4, "rank_pattern": {"v_prj": 2}})
    assert "model.adapter.rank: 17 " in fails({"rank": 4, "rank_pattern": {"k_proj": 17}})
    assert "targets: 're:(' is not a regular expression" in fails({"rank": 4, "targets": ["re:("]})
    assert "model.adapter.bias: all selects no bias" in fails({"rank": 4, "bias": "all"})
    assert "model.adapter.experts: shared" in fails({"rank": 4, "experts": "shared"})
    assert "experts.up_proj is a part of" in fails(
        {"rank": 4, "targets": ["up_proj", "gate_up_proj"]}, "--model.config", json.dumps(MOE)
    )
    assert "model.adapter: path: the adapter folder determines rank" in fails({"path": "x", "rank": 3})
    frozen = {"model": {"foundation": {"config": model_config("qwen3"), "freeze": True}, "config": None}}
    assert "in a component with freeze: true" in fails(
        {"rank": 4}, *[f"--model.{key}={json.dumps(value)}" for key, value in frozen["model"].items()]
    )


def test_adapter_of_different_base_raises_with_first_difference(
    fails: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    assert f"model.adapter.path: {folder} has no adapter_config.json" in fails({"path": str(folder)})
    folder.mkdir()

    def write(fields: dict[str, Any], base: str = "", **settings: Any) -> dict[str, str]:
        model = ours(fields, **settings)
        found = attached(model)
        state = {name: model.get_parameter(name).detach() for name in found.trained}
        write_folder(folder, found, state, None, base)
        return {"path": str(folder)}

    fields = model_config("qwen3")
    deeper = write(fields | {"num_hidden_layers": 3})
    assert "this model has no model.layers.2.mlp.down_proj" in fails(deeper)
    wider = write(fields | {"intermediate_size": 64})
    line = fails(wider)
    weight = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert f"{weight} is (4, 64) in the file and (4, 48) in the model" in line
    assert "The hash of its base is 123," in fails(write(fields, base="123"))
    for key, value, says in (
        ("peft_type", "IA3", "peft_type is 'IA3'"),
        ("rank_pattern", {"q_proj": 2}, "q_proj.lora_A.weight is (4, 32) in the file and (2, 32) in the model"),
        ("init_lora_weights", "pissa", "init_lora_weights is 'pissa'"),
        ("r", "4", "r is '4'"),
    ):
        settings = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        assert says in fails({"path": str(folder)})
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    assert "adapter_model.safetensors: the file is damaged" in fails({"path": str(folder)})


def test_checkpoint_of_different_base_and_merge_without_adapter_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {"rank": 4, "targets": ["q_proj"]}
    config = write_config(tmp_path, model={"adapter": adapter}, train={"steps": 1, "packs_per_step": 1})
    assert main(["train", str(config)]) == 0
    assert main(["train", str(config), "--train.steps", "2", "--model.config.initializer_range", "0.03"]) == 2
    assert "step_00000001: the adapter was trained on a different base model" in capsys.readouterr().err
    assert main(["train", str(config), "--model.adapter", "null", "--log.dir", str(tmp_path / "whole")]) == 0
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "out"), "--merge"]) == 2
    assert "has no adapter" in capsys.readouterr().err


@pytest.mark.slow
def test_composed_model_with_adapters_everywhere_matches_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters in the foundation and its experts, an encoder and a decoder; projectors are fully trained."""
    monkeypatch.syspath_prepend(str(SENSOR))
    monkeypatch.setenv("PYTHONPATH", str(SENSOR), prepend=":")
    targets = ["all-linear", *EXPERTS, "encoders.image.*.self_attn.q_proj", "decoders.series.*"]
    adapter = {"rank": 2, "targets": targets, "modules_to_save": ["image.projector", "audio.projector"]}
    config = write_omni_config(tmp_path, model={"adapter": adapter}, train={"packs_per_step": 4})
    folder = tmp_path / "verify"
    for layout in prepare(load_config(config, []), 2, "uly2.ep2", "fp64", folder):
        verdict = verdict_of(folder, layout)
        assert verdict.passed, verdict.reason
    trained = load_trial(folder).gradients
    assert {name.split(".")[0] for name in trained} == {"foundation", "encoders", "decoders"}
    assert all("lora_" in name or ".projector." in name for name in trained)


@pytest.mark.slow
def test_bf16_run_stores_base_in_bf16_and_adapter_in_fp32(trained: Path, tmp_path: Path) -> None:
    alone = ["--parallel.ulysses", "1", "--parallel.ep", "1", "--train.precision", "bf16"]
    config = load_config(trained / "tiny.yaml", alone)
    published = load_file(trained / "base" / "model.safetensors")
    with process_group() as process:
        model = build_model(config.model, "bf16")
        parallelize_model(model, build_mesh(config, process), config)
        kept = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert {tensor.dtype for name, tensor in kept.items() if "lora_" in name} == {torch.float32}
    assert {tensor.dtype for name, tensor in kept.items() if "lora_" not in name} == {torch.bfloat16}
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(kept[name], published[name].bfloat16())
    assert main(["train", str(trained / "tiny.yaml"), *alone, "--log.dir", str(tmp_path / "run")]) == 0
    for ours, expected in zip(values(tmp_path / "run"), values(trained / "run"), strict=True):
        assert ours[0] == pytest.approx(expected[0], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_own", [False, True])
def test_user_models_and_modules_can_have_adapter(is_own: bool, tmp_path: Path) -> None:
    """Passed as a Python object, whose copy is trained; also with dropout and an 8-bit base."""
    torch.manual_seed(3)
    if is_own:
        given: nn.Module = TinyModel(512, 32, 4, 2)
    else:
        given = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config("llama")))
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    adapter = {"kind": "rslora", "rank": 4, "dropout": 0.1, "base": "int8"}
    train = {"steps": 3, "packs_per_step": 2, "warmup_steps": 0}
    fields = yaml.safe_load(write_config(tmp_path, model={"adapter": adapter}, train=train).read_text())
    fields["model"].pop("config")
    assert omnizoo.train(fields, model=given).exit_code == 0
    losses = [row["loss"] for row in read_steps(tmp_path / "run")]
    assert losses[-1] != losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(tensor.norm() > 0 for tensor in factors.values())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 2
    if not is_own:
        plain = logits_of(given)
        assert not torch.equal(logits_of(PeftModel.from_pretrained(given, tmp_path / "adapter")), plain)
