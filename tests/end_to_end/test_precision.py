"""bf16 rounds only activations: positions and targets keep their precision on every layout."""

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from faults import FAULTS, try_with_cast, try_with_fault
from omni import SENSOR, write_omni_config
from processes import run_on_ranks, train_in_this_world
from tiny import read_steps, write_config
from torch import finfo, nn
from transformers import AutoModelForCausalLM

from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.modalities.decoders.flow import FlowHead
from omnizoo.modalities.item import Port
from omnizoo.models.build import build_model
from omnizoo.models.media.batch import MediaBatch, PromptTransport
from omnizoo.parallel.fsdp.shard import cast_activations
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import Process, process_group
from omnizoo.recipes.zoo import families
from omnizoo.training import setup
from omnizoo.verification.bf16_check import watching
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import parse, prepare, with_family
from omnizoo.verification.rank_processes import run_in_processes
from omnizoo.verification.small_run import shrink
from omnizoo.verification.trial import run_trial

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(ROOT)
        prepare(load_config("examples/published/qwen3_omni.yaml", []), 2, "dp2", "bf16", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2.ep2", pytest.param("uly2", marks=pytest.mark.long)])
def test_bf16_error_of_omni_model_is_independent_of_layout(
    layout: str, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    verdict = verdict_of(published, parse(layout, 2))
    assert verdict.reason == ""
    assert 1e-5 < verdict.gradient < 0.5  # the comparison ran in bf16


@pytest.mark.slow
def test_rounded_positions_are_reported(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_in_processes(2, try_with_cast, published, parse("dp2", 2))
    verdict = json.loads((published / "verdict.json").read_text())
    assert not verdict["passed"]
    for module in ("the model", "model.language_model.rotary_emb"):
        assert f"position_ids (float32) is rounded to bfloat16 in {module}" in verdict["reason"]


@pytest.mark.slow
def test_faults_are_detected_in_bf16(tmp_path: Path) -> None:
    prepare(load_config(ROOT / "examples/qwen3_moe_tiny.yaml", []), 4, "dp2.uly2.ep2", "bf16", tmp_path)
    for fault in ("wrong_divide_factor_on_experts", "packed_samples_see_each_other"):
        assert fault in FAULTS
        run_in_processes(4, try_with_fault, tmp_path, parse("dp2.uly2.ep2", 4), fault)
        verdict = json.loads((tmp_path / "verdict.json").read_text())
        assert not verdict["passed"], fault
        assert "(one process in bf16:" in verdict["reason"], fault


def test_decoder_targets_reach_the_loss_unrounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))
    path = write_omni_config(tmp_path, "qwen3", train={"steps": 1, "packs_per_step": 8})
    config = load_config(path, ["--train.precision", "bf16", "--data.lanes", "1"])
    target_tensors: list[torch.Tensor] = []
    loss_inputs: list[torch.Tensor] = []
    embed_dtypes: list[torch.dtype] = []
    targets, loss, embed = FlowHead.targets, FlowHead.loss, FlowHead.embed

    def record_targets(self: FlowHead, items: Any) -> torch.Tensor:
        target_tensors.append(targets(self, items))
        return target_tensors[-1]

    def record_loss(self: FlowHead, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype == torch.bfloat16
        loss_inputs.append(rows)
        return loss(self, hidden, rows)

    def record_embed(self: FlowHead, rows: torch.Tensor) -> torch.Tensor:
        embed_dtypes.append(rows.dtype)
        return embed(self, rows)

    with (
        patch.multiple(FlowHead, targets=record_targets, loss=record_loss, embed=record_embed),
        process_group() as process,
    ):
        trial = run_trial(config, Layout(), process)
    assert trial.rounded == []
    rows = torch.cat(loss_inputs)
    assert rows.dtype == torch.float32
    assert len(rows) > 0
    assert not torch.equal(rows, rows.bfloat16().float())
    target_rows = {tuple(row) for row in torch.cat(target_tensors).tolist()}
    assert {tuple(row) for row in rows.tolist()} <= target_rows
    assert set(embed_dtypes) == {torch.bfloat16}


class Block(nn.Module):
    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        return hidden.dtype, position_ids


def test_block_casts_only_hidden_states_to_bf16() -> None:
    block = Block()
    positions = torch.arange(257, 264) + 0.5  # bf16 cannot represent them
    cast_activations(block, torch.bfloat16)
    for args, kwargs in (((torch.ones(2),), {}), ((), {"hidden": torch.ones(2)})):
        dtype, received_positions = block(*args, **kwargs, position_ids=positions)
        assert dtype == torch.bfloat16
        assert received_positions is positions


class Rounding(nn.Module):
    """A model that rounds positions before its block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.block(input_ids.float(), position_ids.bfloat16())


def test_positions_rounded_in_a_submodule_are_reported() -> None:
    reports: list[str] = []
    model = Rounding()
    with watching(model, reports):
        model(input_ids=torch.ones(1, 2, dtype=torch.int64), position_ids=torch.ones(1, 2))
    (report,) = reports
    assert report.startswith("position_ids (float32)")
    assert report.endswith("bfloat16 in block")


class Reading(nn.Module):
    """A model that only receives media."""

    def forward(self, media: MediaBatch) -> None: ...


def test_rounded_media_are_reported() -> None:
    def cast(_: nn.Module, args: Any, kwargs: dict[str, MediaBatch]) -> Any:
        items = {}
        for port, port_items in kwargs["media"].items.items():
            items[port] = [{"noise": item["noise"].bfloat16()} for item in port_items]
        return args, {"media": replace(kwargs["media"], items=items)}

    items = {Port("image", "decoder"): [{"noise": torch.tensor([-0.806])}]}
    media = MediaBatch(items, PromptTransport({}), torch.device("cpu"), torch.bfloat16)
    reports: list[str] = []
    model = Reading()
    with watching(model, reports):
        model(media=media)
        assert reports == []
        model.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
    with watching(model, reports):
        model(media=media)
    (report,) = reports
    assert report.startswith("noise of image/decoder (float32)")
    assert "bfloat16" in report


def train(process: Process, config: Path, run: Path) -> None:
    assert train_in_this_world([config, "--log.dir", run]) == 0


def train_and_die(process: Process, config: Path, run: Path) -> None:
    """Train, but kill rank 1 before step 4."""
    from omnizoo.training import loop

    original = loop.train_step

    def step(objective: Any, optimizer: Any, data: Any, number: int, **kwargs: Any) -> Any:
        if process.rank == 1 and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(objective, optimizer, data, number, **kwargs)

    with patch.object(loop, "train_step", step):
        train(process, config, run)


@pytest.mark.slow
def test_killed_bf16_run_resumes_exactly(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": STEPS, "packs_per_step": 4, "precision": "bf16"},
        "checkpoint": {"every": 2},
    }
    config = write_config(tmp_path, **sections)
    assert run_on_ranks(train, 2, config, tmp_path / "uninterrupted").code == 0
    run_on_ranks(train_and_die, 2, config, tmp_path / "killed")
    assert len(read_steps(tmp_path / "killed")) == 3
    resumed = run_on_ranks(train, 2, config, tmp_path / "killed")
    assert resumed.code == 0, resumed.stdout + resumed.stderr
    assert "step_00000002" in resumed.stdout

    def values(run: str) -> list[list[float]]:
        return [[row[key] for key in ("step", "loss", "grad_norm", "tokens")] for row in read_steps(tmp_path / run)]

    assert len(values("uninterrupted")) == STEPS
    assert values("killed") == values("uninterrupted")


# Parameters that transformers loads in fp32 when a model is loaded in bf16; other families have none.
FP32_PARAMETERS = {
    "ernie4_5_moe": {"gate.weight", "gate.moe_statics.e_score_correction_bias"},
    "bailing_hybrid": {"A_log", "dt_bias", "conv1d.weight"},
}
TESTED_FAMILIES = [
    *(entry.family for entry in families() if not entry.is_omni),
    "ernie4_5_moe",
    "longcat_flash",
    "dots1",
]
# These cover all kinds of fp32 tensors; the other families run in `make verify-all`.
COVERING = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "ernie4_5_moe")


@pytest.mark.parametrize(
    "family", [f if f in COVERING else pytest.param(f, marks=pytest.mark.long) for f in TESTED_FAMILIES]
)
def test_bf16_precision_matches_transformers_for_every_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that transformers loads in fp32 with a bf16 model are fp32 in a forward pass.

    Examples are inverse frequencies, correction biases, some routers and the decays of some recurrent layers.
    """
    monkeypatch.chdir(ROOT)
    text = load_config("examples/text_tiny.yaml", ["--train.precision", "bf16"])
    with process_group((0, 1, 0), device="cpu") as process:
        config = shrink(with_family(text, family), 1, "bf16")
        build_model(config.model, "fp32").to_empty(device="cpu").save_pretrained(tmp_path / family)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.bfloat16)
        expected = {name: t.dtype for name, t in (*loaded.named_parameters(), *loaded.named_buffers())}
        dtypes = dtypes_in_a_step(config, process)
    assert set(dtypes) == {name for name in expected if expected[name].is_floating_point}

    lower_precision = {}
    for name, dtype in dtypes.items():
        if finfo(dtype).bits < finfo(expected[name]).bits:
            lower_precision[name] = (dtype, expected[name])
    assert lower_precision == {}

    suffixes = FP32_PARAMETERS.get(family, set())
    fp32_names = [name for name, _ in loaded.named_parameters() if dtypes[name] == torch.float32]
    assert {suffix for suffix in suffixes for name in fp32_names if name.endswith("." + suffix)} == suffixes
    assert all(name.endswith(tuple(suffixes)) for name in fp32_names)


def dtypes_in_a_step(config: Config, process: Process) -> dict[str, torch.dtype]:
    """Return the dtypes of parameters and buffers when the modules of the model run."""
    dtypes: dict[str, torch.dtype] = {}
    original = setup.parallelize_model

    def watch(model: nn.Module, *args: Any, **options: Any) -> None:
        original(model, *args, **options)
        for prefix, module in model.named_modules():
            module.register_forward_pre_hook(partial(record, prefix and prefix + "."))

    def record(prefix: str, module: nn.Module, _: Any) -> None:
        # Submodules are included: their weights may be used without a call. If one is called, its own record is later.
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if t.is_floating_point():
                dtypes[prefix + name] = t.dtype

    with patch.object(setup, "parallelize_model", watch):
        run_trial(config, Layout(), process)
    return dtypes


@pytest.mark.slow
def test_fp32_parameters_are_replicated_and_train_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = with_family(load_config("examples/text_tiny.yaml", []), "ernie4_5_moe")
    prepare(config, 4, "rep2.dp2", "bf16", tmp_path)
    for layout in ("rep2.dp2", "dp2.uly2.ep4"):
        verdict = verdict_of(tmp_path, parse(layout, 4))
        assert verdict.reason == "", layout
