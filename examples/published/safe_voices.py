"""Turns the voices of a published Qwen2.5-Omni folder (`spk_dict.pt`, a pickle, which OmniZoo never reads) into
`spk_dict.safetensors` beside it.

    python examples/published/safe_voices.py models/qwen2.5-omni-7b

torch reads the pickle with `weights_only`: tensors, numbers and names, and no code.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, voice in torch.load(folder / "spk_dict.pt", map_location="cpu", weights_only=True).items():
        tensors[f"{name}.bos_token"] = torch.as_tensor(voice["bos_token"]).reshape(1).long()
        for part in ("cond", "ref_mel"):
            tensors[f"{name}.{part}"] = voice[part].contiguous().clone()
    save_file(tensors, folder / "spk_dict.safetensors")
    print(f"wrote {folder / 'spk_dict.safetensors'}: {', '.join(sorted({key.rpartition('.')[0] for key in tensors}))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
