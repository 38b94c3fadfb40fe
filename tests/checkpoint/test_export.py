"""Weights in and out: an export is the trained model bit for bit, and loading accounts for every key on every rank."""

import ctypes
import gc
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import from_folder, publish
from processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, model_config, read_steps, write_config
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from weights import gives, load, train_and_keep_logits

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.models.build import build_model
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_bitwise_equal_logits(family: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, model={"config": model_config(family)}, train={"steps": 2, "packs_per_step": 2})
    trained = train_and_keep_logits([path])
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype="auto")
    assert model.dtype == torch.float32
    assert gives(model, trained)
    assert {file.suffix for file in out.iterdir()} <= {".json", ".safetensors", ".jinja"}  # nothing to unpickle
    assert model.config.model_type == family
    ours, theirs = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert GenerationConfig.from_pretrained(out) is not None
    # and back in: the exported folder is a model like any published one
    again = tmp_path / "again"
    inputs = ["--model.config", "null", "--model.path", out, "--model.tokenizer", "null"]
    assert main(["train", str(path), *map(str, inputs), "--log.dir", str(again), "--train.steps", "1"]) == 0
    assert read_steps(again)[0]["loss"] < read_steps(tmp_path / "run")[0]["loss"]


def test_generation_config_survives_training_and_export(tmp_path: Path) -> None:
    folder = publish(tmp_path / "model")
    GenerationConfig(max_new_tokens=33, temperature=0.7, do_sample=True).save_pretrained(folder)
    path = write_config(tmp_path, **from_folder(folder), train={"steps": 1, "packs_per_step": 1})
    assert main(["train", str(path)]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    exported = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (exported.max_new_tokens, exported.temperature, exported.do_sample) == (33, 0.7, True)


def test_export_never_overwrites_and_rejects_non_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object) -> str:
        assert main(["export", *map(str, args)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    taken = tmp_path / "taken"
    (tmp_path / "empty").mkdir()
    taken.mkdir()
    (taken / "precious").write_text("")
    assert "nowhere: this is not a folder" in fails(tmp_path / "nowhere", tmp_path / "out")
    assert "contains no intact checkpoint" in fails(tmp_path / "empty", tmp_path / "out")
    path = write_config(tmp_path, train={"steps": 1, "packs_per_step": 1})
    assert main(["train", str(path)]) == 0
    capsys.readouterr()
    assert "is not empty" in fails(tmp_path / "run", taken)
    next((tmp_path / "run" / "checkpoints").rglob("*.safetensors")).write_bytes(b"short")
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert "damaged or incomplete" in fails(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change_weights(folder: Path, remove: str | None = None, **added: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    if remove is not None:
        del weights[remove]
    save_file(weights | added, folder / "model.safetensors", {"format": "pt"})


LACKING = "model.layers.1.mlp.up_proj.weight"
MISFIT = "mlp.down_proj.weight: (32, 48) in the files, (32, 40) in the model"


def check_accounting(process: Process, folder: Path) -> None:
    """Every key of a folder must find its place, unless it is allowed by name not to."""
    lacking, excess = folder / "lacking.yaml", folder / "excess.yaml"
    with pytest.raises(UserError, match=rf"^model\.path: .*: {LACKING}\. .*model\.allow_missing") as error:
        load(process, lacking)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"^model\.path: .*: extra\.weight\. .*model\.allow_unexpected"):
        load(process, excess)
    with pytest.raises(UserError, match=r"^model\.path: .*config\.json: .*down_proj\.weight: \(") as error:
        load(process, folder / "misfit.yaml")
    (folder / f"misfit.{process.world_size}.{process.rank}.txt").write_text(str(error.value))
    full = load_file(folder / "full" / "model.safetensors")
    assert load(process, excess, "--model.allow_unexpected", "[extra.*]").keys() == full.keys()
    drawn = [load(process, lacking, "--model.allow_missing", "['*.up_proj.weight']") for _ in range(2)]
    for weights in drawn:
        assert [name for name in full if not torch.equal(weights[name], full[name])] == [LACKING]
    assert torch.equal(drawn[0][LACKING], drawn[1][LACKING])
    assert 0.01 < drawn[0][LACKING].std() < 0.03  # by the family's own rule


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    variants = {name: folder / name for name in ("full", "lacking", "excess", "misfit")}
    for variant in variants.values():
        publish(variant)
    change_weights(variants["lacking"], remove=LACKING)
    change_weights(variants["excess"], **{"extra.weight": torch.zeros(3)})
    config = json.loads((variants["misfit"] / "config.json").read_text()) | {"intermediate_size": 40}
    (variants["misfit"] / "config.json").write_text(json.dumps(config))
    for name, variant in variants.items():
        shutil.move(write_config(folder, **from_folder(variant), train={"steps": 2}), folder / f"{name}.yaml")
    return folder


def test_missing_or_unexpected_keys_of_folder_raise(folders: Path) -> None:
    with process_group() as process:
        check_accounting(process, folders)
    assert MISFIT in (folders / "misfit.1.0.txt").read_text()


def test_pickled_weights_are_never_read(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "full", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    path = write_config(tmp_path, **from_folder(tmp_path / "model"))
    with process_group() as process, pytest.raises(UserError, match=r"no model\.safetensors.*pickles"):
        load(process, path)


def peak_memory(work: Callable[[], Any]) -> int:
    """Bytes that `work` needed at most on top of what this process held. Untouched pages of mapped files do not count:
    they are the system's cache, which it takes back at will.
    """

    def anonymous() -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there to be used again
    before, seen, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    seen.append(anonymous())
    done.set()
    watcher.join()
    return max(seen) - before


def two_ranks(process: Process, folder: str) -> None:
    check_accounting(process, Path(folder))
    for family in FAMILIES:
        found = load(process, Path(folder) / f"{family}.yaml")
        whole = dict(AutoModelForCausalLM.from_pretrained(Path(folder) / family).named_parameters())
        assert found.keys() == whole.keys()
        assert [name for name in found if not torch.equal(found[name], whole[name])] == []
    large = Path(folder) / "large.yaml"
    check_memory(process, large, "--model.path", "null", "--model.config", str(Path(folder) / "large"))
    check_memory(process, large)
    logits = train_and_keep_logits([Path(folder) / "full.yaml", "--log.dir", Path(folder) / "trained"])
    if process.rank == 0:
        save_file({"logits": logits}, Path(folder) / "logits.safetensors")


def check_memory(process: Process, path: Path, *overrides: str) -> None:
    """While a model gets its weights, a rank holds its own shard and little more (drawn weights: a block)."""
    config = load_config(path, list(overrides))
    model = build_model(config.model, config.train.precision)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    spare = sum(p.nbytes for p in model.model.layers[0].parameters()) if config.model.config else max(sizes)

    def get_weights() -> None:
        parallelize_model(model, build_mesh(config, process), config)
        for parameter in model.parameters():
            parameter.detach().to_local().add_(
                0
            )  # a page of a file becomes memory once it is written, as training will

    held, shard = peak_memory(get_weights), sum(sizes) / process.world_size
    print(f"rank {process.rank} held {held / 2**20:.0f} MiB, its shard has {shard / 2**20:.0f} MiB", flush=True)
    assert 0.9 * shard <= held <= shard + 2 * spare + 12 * 2**20 < 0.9 * sum(sizes)


@pytest.mark.slow
def test_two_ranks_load_shards_and_export_trained_weights(folders: Path) -> None:
    for family in FAMILIES:
        publish(folders / family, family)
        shutil.move(write_config(folders, **from_folder(folders / family)), folders / f"{family}.yaml")
    publish(folders / "large", "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=10, head_dim=128)
    shutil.move(write_config(folders, **from_folder(folders / "large")), folders / "large.yaml")
    shutil.move(write_config(folders, **from_folder(folders / "full"), train={"steps": 2}), folders / "full.yaml")
    result = run_on_ranks(two_ranks, 2, str(folders))
    print(result.stdout)
    assert result.code == 0, result.stdout + result.stderr
    assert main(["export", str(folders / "trained"), str(folders / "exported")]) == 0
    model = AutoModelForCausalLM.from_pretrained(folders / "exported", attn_implementation="eager")
    assert gives(model, load_file(folders / "logits.safetensors")["logits"])
    assert MISFIT in (folders / "misfit.2.0.txt").read_text()
