"""Composed models: with any mix of media, every layout matches one process, and no rank deadlocks."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from omni import FOUNDATIONS, MODALITIES, SENSOR, VISION, make_media, write_omni_config
from tiny import SHAPE, read_steps, write_config, write_rows

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.sample import Sample, SampleId
from omnizoo.models.build import build_model
from omnizoo.models.media.composed import OmniModel
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.loop import train
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import load_trial, prepare
from omnizoo.verification.rank_processes import run_in_processes


@pytest.fixture(autouse=True)
def sensor_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))
    monkeypatch.setenv("PYTHONPATH", str(SENSOR), prepend=":")


def disagreements(
    config: Path, world: int, layouts: str, folder: Path, *overrides: str, precision: str = "fp32"
) -> list[str]:
    """Return the reasons of all layouts that do not agree with one process."""
    reasons = []
    for layout in prepare(load_config(config, list(overrides)), world, layouts, precision, folder):
        verdict = verdict_of(folder, layout)
        if not verdict.passed:
            reasons.append(verdict.reason)
    return reasons


ROUTED = {
    "losses": [
        {"kind": "cross_entropy"},
        {"kind": "balance", "weight": 0.01},
        {"kind": "router_z", "weight": 0.001},
    ]
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",  # the next tests cover ring attention and replicas
    ["dp2.uly2.ep4", pytest.param("rep2.dp2,uly2.ring2", marks=pytest.mark.long)],
)
def test_all_modalities_in_and_out_agree_with_one_process_on_mixed_layouts(layouts: str, tmp_path: Path) -> None:
    config = write_omni_config(tmp_path, train=ROUTED)
    assert disagreements(config, 4, layouts, tmp_path / "fp32") == []


@pytest.mark.long
def test_all_modalities_in_and_out_agree_in_fp64_on_eight_ranks(tmp_path: Path) -> None:
    config = write_omni_config(tmp_path, train=ROUTED)
    assert disagreements(config, 8, "dp2.uly2.ring2.ep4", tmp_path / "fp64", precision="fp64") == []


@pytest.mark.long  # tests/recipes/test_zoo.py covers each foundation alone
@pytest.mark.parametrize("foundation", ["gemma3_text", "llama", "qwen3"])
def test_every_foundation_supports_the_same_modalities(foundation: str, tmp_path: Path) -> None:
    config = write_omni_config(tmp_path, foundation)
    assert disagreements(config, 4, "rep2.uly2", tmp_path / "verify") == []


@pytest.mark.slow
def test_frozen_components_agree_and_get_no_gradient(tmp_path: Path) -> None:
    config = write_omni_config(tmp_path, "qwen3_moe", ("image", "audio", "series"))
    frozen = [f"--model.modalities.{name}.encoder.freeze=true" for name in ("image", "audio")]
    frozen += ["--model.foundation.freeze=true", "--model.modalities.series.encoder.lr=1e-4"]
    assert disagreements(config, 2, "ring2.ep2", tmp_path / "verify", *frozen) == []
    trained = load_trial(tmp_path / "verify").gradients
    assert not [name for name in trained if name.startswith(("foundation.", "encoders.image.tower"))]
    assert [name for name in trained if name.startswith("encoders.image.projector")]


@pytest.mark.slow
def test_model_without_projector_agrees_with_one_process(tmp_path: Path) -> None:
    image = {"encoder": {"kind": "vision", "config": {**VISION, "hidden_size": SHAPE["hidden_size"]}}}
    image["projector"] = "none"
    rows = [
        {"messages": [{"role": "user", "content": "<image> what?"}, {"role": "assistant", "content": f"it is {i}"}]}
        | {"images": [make_media(tmp_path / "media", random.Random(0), 2)["image"][i % 2]]}
        for i in range(16)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    config = write_config(
        tmp_path,
        model={
            "config": None,
            "foundation": {"config": {"model_type": "llama", **SHAPE, "vocab_size": 544}},
            "modalities": {"image": image},
        },
        data={"sources": [{"path": str(tmp_path / "rows.jsonl")}], "pack_tokens": 128},
    )
    assert disagreements(config, 2, "uly2", tmp_path / "verify") == []
    names = load_trial(tmp_path / "verify").gradients
    assert not [name for name in names if ".projector." in name]


class Mix:
    """A loader of prepared rows: `mixes[step][pack]` is a list of rows."""

    def __init__(
        self, config: Config, model: torch.nn.Module, rank: int, world: int, mixes: list[list[list[Any]]]
    ) -> None:
        media = read_modalities(model, config.model)
        self.reader = build_reader(config, load_tokenizer(config.model), **media)
        self.rank = rank
        self.world = world
        self.mixes = iter(mixes)

    def next_step(self) -> LoadedStep:
        packs = []
        for index, rows in enumerate(next(self.mixes)):
            if index % self.world == self.rank:
                find = self.reader.sources[0].folder.find
                rendered = [self.reader.renderer.render(row, (0, 0, i), find) for i, row in enumerate(rows)]
                samples = [Sample(r.columns, r.items, id=SampleId(0, 0, i, 0)) for i, r in enumerate(rendered)]
                packs.append(prepare_pack(index, samples, self.reader)[0])
        return LoadedStep(packs)

    def counters(self) -> dict[str, int]:
        return {}


def train_on_mixes(process: Process, path: Path, axes: dict[str, int], mixes: list[Any]) -> None:
    config = load_config(path, [f"--parallel.{axis}={size}" for axis, size in axes.items()])
    mesh = build_mesh(config, process)
    model = build_model(config.model, config.train.precision)
    loader: Any = Mix(config, model, mesh.rank, mesh.layout.world, mixes)
    parallelize_model(model, mesh, config)
    optimizer = build_optimizer(model, config)
    objective = build_objective(model, mesh, config)
    results = []
    for step in range(1, len(mixes) + 1):
        data = next_step(loader, Balancer(model, mesh, config))
        with CollectiveCounter() as counter:
            result = train_step(objective, optimizer, data, step)
        results.append([result.loss, result.grad_norm])
        if mesh.layout.world > 1 and mesh.layout.sp == mesh.layout.ep == 1:
            # One all-to-all sends features and decoder targets together; a second one returns gradients of features.
            roles_per_batch = [{port.role for port in batch.routes} for batch in data.micro_batches]
            expected_calls = sum(bool(roles) + ("encoder" in roles) for roles in roles_per_batch)
            assert counter.calls["all-to-all"] == expected_calls
    if mesh.is_first:
        name = "-".join(f"{axis}{size}" for axis, size in axes.items()) or "one"
        (path.parent / f"{name}.json").write_text(json.dumps(results))


def random_mixes(folder: Path, count: int, packs: int, rng: random.Random) -> list[list[list[Any]]]:
    """Return steps without media, with one media item, with one modality, and with different media on every rank."""
    media = make_media(folder / "media", rng, count=3)

    def row(names: list[str]) -> Any:
        prompt: list[Any] = [{"type": "text", "text": "what is this?"}]
        response: list[Any] = [{"type": "text", "text": "it is"}]
        for name in names:
            content = response if "decoder" in MODALITIES[name] and rng.random() < 0.4 else prompt
            content.append({"type": name, name: rng.choice(media[name])})
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}

    mixes: list[list[list[Any]]] = []
    for number in range(count):
        step: list[list[Any]] = [[row([])] for _ in range(packs)]
        if number % 4 == 1:  # only one rank has a media item
            step[rng.randrange(packs)] = [row(["video"])]
        elif number % 4 == 2:
            modality = rng.choice(list(MODALITIES))
            step = [[row([modality] * rng.randint(0, 2))] for _ in range(packs)]
        elif number % 4 == 3:
            step = [[row(rng.choices(list(MODALITIES), k=rng.randint(0, 3)))] for _ in range(packs)]
        mixes.append(step)
    return mixes


@pytest.mark.parametrize(
    ("world", "axes", "count"),
    [
        (2, {"ep": 2}, 4),
        pytest.param(4, {"ulysses": 2, "ep": 4}, 12, marks=pytest.mark.long),
        pytest.param(4, {"dp_replicate": 2}, 12, marks=pytest.mark.long),
        pytest.param(4, {"ring": 4}, 12, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.slow
def test_mix_of_media_neither_deadlocks_nor_changes_losses(
    world: int, axes: dict[str, int], count: int, tmp_path: Path
) -> None:
    config = write_omni_config(tmp_path, data={"pack_tokens": 256})
    write_rows(tmp_path / "rows.jsonl", [{"text": "never read"}])
    mixes = random_mixes(tmp_path, count, 4, random.Random(1))
    with process_group() as process:
        train_on_mixes(process, config, {}, mixes)
    expected = torch.tensor(json.loads((tmp_path / "one.json").read_text()))
    run_in_processes(world, train_on_mixes, config, axes, mixes, timeout=240)
    name = "-".join(f"{axis}{size}" for axis, size in axes.items())
    results = torch.tensor(json.loads((tmp_path / f"{name}.json").read_text()))
    assert (results / expected - 1).abs().max() < 1e-5


def test_without_media_encoders_get_exactly_zero_gradients(tmp_path: Path) -> None:
    config = load_config(write_omni_config(tmp_path, "qwen3"), [])
    with process_group() as process:
        mesh = build_mesh(config, process)
        model = build_model(config.model, "fp32")
        row = {"messages": [{"role": role, "content": "just words"} for role in ("user", "assistant")]}
        loader: Any = Mix(config, model, 0, 1, [[[row]]])
        parallelize_model(model, mesh, config)
        objective = build_objective(model, mesh, config)
        data = next_step(loader, Balancer(model, mesh, config))
        torch.stack([term.sum for batch in data.micro_batches for term in objective.terms(batch)]).sum().backward()
        assert isinstance(model, OmniModel)
        for name, parameter in [*model.encoders.named_parameters(), *model.decoders.named_parameters()]:
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert not parameter.grad.full_tensor().any(), name


def test_media_bad_after_packing_are_skipped_and_counted(tmp_path: Path) -> None:
    """A truncated image has a valid header, so it is in a pack before decoding fails."""
    path = write_omni_config(tmp_path, "qwen3", ("image",), train={"steps": 3})
    content = (tmp_path / "media" / "0.png").read_bytes()
    (tmp_path / "media" / "0.png").write_bytes(content[: len(content) // 2])
    assert train(load_config(path, ["--data.on_bad_row=skip"])).exit_code == 0
    listed = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    last = read_steps(tmp_path / "run")[-1]
    assert last["undecodable_rows"] == len(listed) > 0
    assert all("rows.jsonl:" in json.dumps(row) and "0.png" in json.dumps(row) for row in listed)
    assert last["loss"] > 0
    with pytest.raises(UserError, match=r"rows\.jsonl:\d+: .*0\.png.*on_bad_row"):
        train(load_config(path, [f"--log.dir={tmp_path / 'again'}"]))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("--model.modalities.image.encoder.kind=visoin", "visoin.*vision"),
        ("--model.modalities.series.encoder.kind=sensor:Nothing", "cannot import sensor:Nothing"),
        ("--model.modalities.series.encoder.kind=sensor:SeriesDecoder", "SeriesDecoder.*subclass"),
        ("--model.modalities.series.encoder.options={patches: 4}", "SeriesEncoder\\(.*'patches'"),
        ("--model.foundation.dtype=bf16", "freeze: true"),
    ],
)
def test_invalid_submodule_raises_with_its_key(override: str, reason: str, tmp_path: Path) -> None:
    config = load_config(write_omni_config(tmp_path, "qwen3", ("image", "series")), [override])
    with process_group() as process:
        mesh = build_mesh(config, process)
        with pytest.raises(UserError, match=reason):
            parallelize_model(build_model(config.model, "fp32"), mesh, config)


def test_there_are_four_foundations() -> None:
    assert set(FOUNDATIONS) == {"llama", "qwen3", "qwen3_moe", "gemma3_text"}
