"""Files of a model repository that a download needs."""

from omnizoo.hub.resolve import choose_model_files

PIPELINE = [
    "README.md",
    "flux1-dev.safetensors",  # the original release, as large as the transformer
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "images/sample.safetensors",
]
NOT_NEEDED = {
    "README.md",
    "flux1-dev.safetensors",
    "text_encoder/pytorch_model.bin",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "images/sample.safetensors",
}


def test_pipeline_repository_gives_each_weight_of_its_components_once() -> None:
    assert set(choose_model_files(PIPELINE, "", "model")) == set(PIPELINE) - NOT_NEEDED
    settings = choose_model_files(PIPELINE, "", "settings")
    assert [name for name in settings if name.endswith(".safetensors")] == []
    assert {"model_index.json", "scheduler/scheduler_config.json", "tokenizer/merges.txt"} <= set(settings)
    in_folder = [f"wan/{name}" for name in PIPELINE]
    assert set(choose_model_files(in_folder, "wan", "model")) == {f"wan/{n}" for n in set(PIPELINE) - NOT_NEEDED}
