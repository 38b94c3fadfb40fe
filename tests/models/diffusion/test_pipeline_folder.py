"""Pipeline folders: components, settings and the lines that say why a folder cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipelines import make_pipeline

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder, is_pipeline_folder

Index = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline("wan_two_experts", tmp_path_factory.mktemp("wan") / "pair")


def test_pipeline_folder_lists_components_and_settings(pair: Path) -> None:
    pipeline = PipelineFolder.read(pair)
    assert is_pipeline_folder(pair)
    assert not is_pipeline_folder(pair / "transformer")
    assert pipeline.pipeline_class.__name__ == pipeline.class_name == "WanPipeline"
    assert list(pipeline.denoisers) == ["transformer", "transformer_2"]
    assert pipeline.settings["boundary_ratio"] == 0.875
    assert pipeline.scheduler_config["flow_shift"] == 3.0
    assert pipeline.vae_config["latents_std"] == [1.5, 0.5, 2.0, 1.0]
    for component in pipeline.components.values():
        assert component.load_class().__name__.startswith(component.class_name)
    for name in ("transformer", "vae", "text_encoder"):
        assert all(file.suffix == ".safetensors" for file in pipeline.component(name).weight_files())


def use_unknown_pipeline(index: Index) -> None:
    index["_class_name"] = "MyPipeline"


def use_own_code(index: Index) -> None:
    index["_class_name"] = ["my_pipeline", "MyPipeline"]


def use_unknown_component(index: Index) -> None:
    index["transformer"] = ["diffusers", "MyTransformer3DModel"]


def use_module_of_the_folder(index: Index) -> None:
    index["transformer"] = ["transformer/my_model", "WanTransformer3DModel"]


def use_absent_folder(index: Index) -> None:
    index["controlnet"] = ["diffusers", "ControlNetModel"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (use_unknown_pipeline, ("_class_name", "MyPipeline")),
        (use_own_code, ("_class_name", "MyPipeline")),
        (use_unknown_component, ("transformer:", "MyTransformer3DModel")),
        (use_module_of_the_folder, ("transformer:", "transformer/my_model")),
        (use_absent_folder, ("controlnet:", "not a folder")),
    ],
)
def test_unusable_index_is_one_line(
    change: Callable[[Index], None], words: tuple[str, ...], pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    for component in pair.iterdir():
        if component.is_dir():
            (folder / component.name).symlink_to(component)
    index = json.loads((pair / "model_index.json").read_text())
    change(index)
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"^model\.path: ") as caught:
        PipelineFolder.read(folder)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_component_without_safetensors_is_refused(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text((pair / "model_index.json").read_text())
    for component in pair.iterdir():
        if component.is_dir():
            (tmp_path / component.name).mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match=r"^model\.path: .*safetensors"):
        PipelineFolder.read(tmp_path).component("vae").weight_files()
    with pytest.raises(UserError, match=r"^model\.path: .* no component `unet`"):
        PipelineFolder.read(tmp_path).component("unet")
