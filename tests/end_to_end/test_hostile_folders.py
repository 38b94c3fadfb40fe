"""Code in model and run folders is imported or run only with permission from the command line or the user's config.

Each test plants code that leaves a trace when it runs. SECURITY.md refers to these tests.
"""

import ast
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import publish
from fixtures import make_tokenizer
from omni import SENSOR, VISION, write_omni_config
from tiny import SHAPE, write_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.models.media.composed import OmniModel
from omnizoo.reporting.report import write_report
from omnizoo.reporting.run_folder import RunFolder

REMOTE = """
from pathlib import Path
Path({trace!r}).write_text("executed")
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own_remote"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
SHORT = {"steps": 1, "packs_per_step": 1}


def one_line(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run a command that must exit with 2, and return its one error line."""
    capsys.readouterr()
    assert main([str(arg) for arg in args]) == 2
    err = capsys.readouterr().err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    return err


@pytest.fixture
def remote(tmp_path: Path) -> tuple[Path, Path]:
    """Return a model folder with remote code, which works if it is trusted, and the file that the code writes."""
    folder = publish(tmp_path / "remote")
    trace = tmp_path / "executed"
    fields = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "own_remote", "auto_map": code}))
    (folder / "own.py").write_text(REMOTE.format(trace=str(trace)))
    return folder, trace


def test_code_in_a_folder_runs_only_if_trusted(
    remote: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes checkpoints: the config.yaml in a checkpoint does not give permission to export it."""
    folder, trace = remote
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks on the terminal"))
    ask = ["generate", folder, "--prompt", "so", "--max-tokens", 1]
    model = {"config": None, "path": str(folder), "tokenizer": str(tmp_path / "tokenizer")}
    path = write_config(tmp_path, model=model, train=SHORT)
    for command in (ask, ["train", path]):
        err = one_line(capsys, *command)
        assert "own.OwnConfig" in err
        assert "--trust-remote-code" in err
    assert not trace.exists()
    assert main([*map(str, ask), "--trust-remote-code"]) == 0
    assert trace.exists()

    assert main(["train", str(path), "--model.trust_remote_code", "true"]) == 0
    trace.unlink()
    for name in [name for name in sys.modules if "transformers_modules" in name]:
        del sys.modules[name]
    assert "--trust-remote-code" in one_line(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert not trace.exists()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run_with_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run of a composed model with plugins as encoder and decoder, whose module can be imported."""
    monkeypatch.syspath_prepend(str(SENSOR))
    path = write_omni_config(tmp_path, "llama", train=SHORT)
    assert main(["train", str(path)]) == 0  # the user's config names the plugin, which gives permission
    monkeypatch.delitem(sys.modules, "sensor")
    return tmp_path / "run"


def test_module_named_in_a_folder_needs_permission(
    run_with_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    err = one_line(capsys, "export", run_with_plugin, out)
    assert "sensor:SeriesEncoder" in err
    assert "--allow-code sensor" in err
    assert "--allow-code sensor" in one_line(capsys, "export", run_with_plugin, out, "--allow-code", "sens")
    assert "--allow-code sensor" in one_line(capsys, "export", run_with_plugin, out, "--allow-code", "sensor.below")
    assert "sensor" not in sys.modules
    assert main(["export", str(run_with_plugin), str(out), "--allow-code", "sensor"]) == 0
    del sys.modules["sensor"]

    ask = ["generate", out, "--prompt", "so", "--max-tokens", 1]
    assert "--allow-code sensor" in one_line(capsys, *ask)
    for load in (OmniModel.from_pretrained, AutoModelForCausalLM.from_pretrained, load_chat_model):
        with pytest.raises(UserError, match="allow_code="):
            load(out)
    path = write_omni_config(tmp_path / "again", train=SHORT, model={"foundation": None, "modalities": {}})
    again = ["train", path, "--model.path", out, "--model.tokenizer", "null"]
    assert "model.allow_code: [sensor]" in one_line(capsys, *again)
    assert "sensor" not in sys.modules
    assert OmniModel.from_pretrained(out, allow_code=["sensor"]).config.allow_code == ["sensor"]
    assert main([*map(str, ask), "--allow-code", "sensor"]) == 0
    assert main([*map(str, again), "--model.allow_code", "[sensor]"]) == 0


def test_permissions_in_files_are_ignored_and_not_written(
    run_with_plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run_with_plugin), str(out), "--allow-code", "sensor"]) == 0
    del sys.modules["sensor"]
    text = (out / "config.json").read_text()
    assert "allow_code" not in text
    assert "is_own" not in text
    for claim in ({"allow_code": ["sensor"]}, {"is_own": True}, {"_name_or_path": "/", "allow_code": "sensor"}):
        (out / "config.json").write_text(json.dumps(json.loads(text) | claim))
        assert "--allow-code sensor" in one_line(capsys, "generate", out, "--prompt", "so")
    assert "sensor" not in sys.modules


def test_resuming_never_imports_code_named_in_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run uses the user's config, never the config in the checkpoint."""
    monkeypatch.syspath_prepend(str(tmp_path / "evil"))
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "planted.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    path = write_config(tmp_path, train=SHORT)
    assert main(["train", str(path)]) == 0
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    settings, config = step / "config.yaml", step / "model" / "config.json"
    settings.write_text(settings.read_text().replace("module: null", "module: planted:Model"))
    kind = {"marks": dict.fromkeys(("begin", "placeholder", "end"), "<|pad|>"), "decoder": {"kind": "planted:Model"}}
    config.write_text(json.dumps({"model_type": "omnizoo", "foundation": SHAPE, "modalities": {"a": kind}}))
    sizes = {str(file.relative_to(step)): file.stat().st_size for file in step.rglob("*") if file.is_file()}
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(manifest | {"files": sizes}))
    main(["train", str(path), "--train.steps", "2"])
    assert not (tmp_path / "executed").exists()


def test_checkpoint_of_composed_model_is_self_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint contains the preprocessing of its encoders and no path outside of it."""
    monkeypatch.syspath_prepend(str(SENSOR))
    encoder_folder = tmp_path / "seen"
    fields = dict(VISION)
    AutoModel.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(encoder_folder)
    preprocessing = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (encoder_folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    path = write_omni_config(tmp_path, "llama", train=SHORT)
    encoder = f"{{kind: vision, path: {encoder_folder}}}"
    assert main(["train", str(path), "--model.modalities.image.encoder", encoder]) == 0
    shutil.rmtree(encoder_folder)
    step = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert str(tmp_path) not in (step / "model" / "config.json").read_text()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--allow-code", "sensor"]) == 0
    assert json.loads((tmp_path / "out" / "image_encoder" / "preprocessor_config.json").read_text()) == preprocessing
    assert load_chat_model(tmp_path / "out", allow_code=["sensor"]).write("so", max_tokens=1) is not None


def test_chat_template_cannot_access_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = publish(tmp_path / "model")
    trace = tmp_path / "executed"
    template = "{{ cycler.__init__.__globals__.os.system('touch " + str(trace) + "') }}"
    make_tokenizer(folder, template)
    assert "template" in one_line(capsys, "generate", folder, "--prompt", "so")
    assert not trace.exists()


def test_names_in_a_run_folder_are_escaped_in_the_report(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.metrics.write_text(json.dumps({"step": 1, "loss": 1.0, f"eval/{attack}": 1.0, f"{attack}/x": 2.0}) + "\n")
    run.config.write_text(f"train: {{steps: 1}}\nmodel: {{path: '{attack}'}}\n")
    run.bad_rows.write_text(json.dumps({"step": 1, "row": attack, attack: attack}) + "\n")
    page = write_report(run).read_text()
    assert attack not in page
    assert "<img src=x" not in page
    assert page.count("<script") == 1  # the script of the report


def test_package_never_unpickles_or_loads_yaml_objects() -> None:
    """No source file uses torch.load, pickle, allow_pickle of numpy, yaml.load, eval or exec.

    The exception is data that a rank passes to its loader workers, in an anonymous file that only they can open.
    """
    violations = []
    package = Path(__file__).parents[2] / "omnizoo"
    for file in sorted(set(package.rglob("*.py")) - {package / "data/loading/worker_pickling.py"}):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                unsafe = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if called in ("torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec", "np.load", "joblib.load"):
                    violations.append(f"{file}:{node.lineno}: {called}")
                if unsafe.get("allow_pickle", "False") != "False" or unsafe.get("weights_only") == "False":
                    violations.append(f"{file}:{node.lineno}: {called}")
            names: list[Any] = node.names if isinstance(node, ast.Import) else []
            modules = [name.name for name in names]
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in modules} & {"pickle", "dill", "marshal", "shelve", "cloudpickle"}:
                violations.append(f"{file}:{node.lineno}: {modules}")
    assert violations == []


def test_every_module_that_imports_by_name_is_known() -> None:
    """Only these files call `import_module`. The comments say which modules each of them imports."""
    package = Path(__file__).parents[2] / "omnizoo"
    importing = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if any(
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "__import__")
            for node in ast.walk(ast.parse(file.read_text()))
        )
    }
    assert importing == {
        "__init__.py",  # public names of the package
        "cli/parser.py",  # commands of the package
        "config/plugins.py",  # plugins of the user's config; encoders and decoders of a folder if allowed (check_code)
        "modalities/decoders/image_tokenizers.py",  # the module of a config class of transformers
        "modalities/frozen_tokenizer.py",  # diffusers
        "modalities/files/decoding.py",  # media libraries
        "ops/linear_attention/kernels.py",  # kernel libraries
        "models/diffusion/pipeline_folder.py",  # diffusers, its pipelines and transformers
        "models/diffusion/recipe.py",  # recipes of the package
        "models/recipe.py",  # recipes of the package
        "recipes/zoo.py",
    }


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    folder = publish(tmp_path / "model")
    original = torch.load

    def fail(*args: Any, **kwargs: Any) -> None:
        pytest.fail("torch.load was called")

    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    torch.load = fail
    try:
        assert load_chat_model(folder).write("so", max_tokens=1) is not None
        (folder / "model.safetensors").unlink()
        with pytest.raises(UserError, match=r"model\.safetensors.*pickle"):
            load_chat_model(folder)
    finally:
        torch.load = original
