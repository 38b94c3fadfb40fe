"""Create environments for contestants that cannot run in OmniZoo's own: `python benchmarks/peers/venvs.py`.

torch has the version that OmniZoo is tested with. The pins of LLaMA-Factory conflict with ours. It is installed without
its dependencies, because some are large and not used here (a web interface, audio for CUDA). Those that training
imports are listed below. Processors of vision models need torchvision, which a second environment adds to OmniZoo's.
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
    """Return the Python executable of an environment."""
    return FOLDER / name / "bin" / "python"


def create(name: str) -> None:
    """Create an environment, unless it is complete."""
    complete = FOLDER / name / "complete"
    if complete.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER / name)], check=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
    if name == "llama_factory":
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, TORCH, *ITS_DEPENDENCIES], check=True)
        subprocess.run([*pip, "--no-deps", *LLAMA_FACTORY], check=True)
    else:
        subprocess.run([*pip, "--no-deps", TORCHVISION], check=True)
        site_packages = next((FOLDER / name / "lib").glob("python*")) / "site-packages"
        (site_packages / "omnizoo_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    complete.touch()


if __name__ == "__main__":
    for name in sys.argv[1:] or ("llama_factory", "vision"):
        create(name)
