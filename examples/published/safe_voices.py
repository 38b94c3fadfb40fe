"""Convert the speakers of a published Qwen2.5-Omni folder from `spk_dict.pt` to `spk_dict.safetensors`.

    python examples/published/safe_voices.py models/qwen2.5-omni-7b

`spk_dict.pt` is a pickle, which OmniZoo never reads. This script loads it with `weights_only`, so no code in it is run.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, speaker in torch.load(folder / "spk_dict.pt", map_location="cpu", weights_only=True).items():
        tensors[f"{name}.bos_token"] = torch.as_tensor(speaker["bos_token"]).reshape(1).long()
        for key in ("cond", "ref_mel"):
            tensors[f"{name}.{key}"] = speaker[key].contiguous().clone()
    save_file(tensors, folder / "spk_dict.safetensors")
    speakers = sorted({key.rpartition(".")[0] for key in tensors})
    print(f"Wrote {folder / 'spk_dict.safetensors'}: {', '.join(speakers)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
