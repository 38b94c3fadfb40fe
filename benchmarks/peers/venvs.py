"""Makes the environments of opponents that OmniZoo's own cannot run: `python benchmarks/peers/venvs.py`.

torch is the one that OmniZoo is tested with. LLaMA-Factory's pins do not agree with ours; it comes without its
dependencies, because some of them (a web page, audio for CUDA) are large and not used here; those that training imports
are named below. Processors of vision models want torchvision: a second environment has it on top of OmniZoo's own.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / "runs" / "peers"
TORCH, TORCHVISION = "torch==2.13.0", "torchvision==0.28.0"
LLAMA_FACTORY = ["llamafactory==0.9.5", "torchdata==0.11.0", TORCHVISION]
ITS_DEPENDENCIES = [
    "transformers==5.6.0",
    "accelerate==1.11.0",
    "datasets==4.0.0",
    "peft==0.18.1",
    "trl==0.24.0",
    "tyro<0.9.0",
    "einops",
    "fire",
    "omegaconf",
    "sentencepiece",
    "tiktoken",
    "protobuf",
    "scipy",
    "pandas",
    "av<=16.0.0",
    "pillow",
    "psutil",
    "pyyaml",
    "matplotlib",
    "pydantic",
    "numpy",
    "hf-transfer",
]


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def make(name: str) -> None:
    made = FOLDER / name / "complete"
    if made.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER / name)], check=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
    if name == "llama_factory":
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, TORCH, *ITS_DEPENDENCIES], check=True)
        subprocess.run([*pip, "--no-deps", *LLAMA_FACTORY], check=True)
    else:
        subprocess.run([*pip, "--no-deps", TORCHVISION], check=True)
        own = next((FOLDER / name / "lib").glob("python*")) / "site-packages"
        (own / "omnizoo_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    made.touch()


if __name__ == "__main__":
    for name in sys.argv[1:] or ("llama_factory", "vision"):
        make(name)
