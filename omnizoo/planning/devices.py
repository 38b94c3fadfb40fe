"""Memory size, FLOP/s and bandwidths of accelerators, from data sheets. Bandwidths between devices are approximate."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from omnizoo.config.errors import UserError


@dataclass(frozen=True)
class Device:
    """Properties of an accelerator. A value of 0 means that the property is unknown."""

    memory_gb: float  # advertised size in GB, used as GiB: this is closer to the real size of 80 GB devices
    per_node: int = 8  # devices per node
    bf16_tflops: float = 0.0  # peak of dense matmuls with fp32 accumulation
    inside_gb_per_s: float = 0.0  # bandwidth to the other devices of a node, in one direction
    across_gb_per_s: float = 0.0  # bandwidth of each device to other nodes, in one direction
    memory_gb_per_s: float = 0.0  # bandwidth of the device memory
    fp32_tflops: float = 0.0  # peak of matmuls in dtypes with more than 16 bits
    save_gb_per_s: float = 2.0  # bandwidth of a node to the checkpoint storage; the default is a guess


DEVICES = {
    "a100": Device(80, 8, 312.0, 300, 25, 2039, 19.5),
    "h100": Device(80, 8, 989.0, 450, 50, 3350, 67.0),
    "h200": Device(141, 8, 989.0, 450, 50, 4800, 67.0),
    "b200": Device(180, 8, 2250.0, 900, 50, 8000, 80.0),
    "mi300x": Device(192, 8, 1307.4, 448, 50, 5300, 163.4),
}
MAX_FILE_SIZE = 2**16  # characters


def read_device(name: str) -> Device:
    """Return the device with this name, or read it from a YAML file with the fields of `Device`.

    Raises:
        UserError: If `name` is neither a known device nor a valid file.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    example = ", ".join(f"{key}: {value:g}" for key, value in asdict(DEVICES["h100"]).items())
    expected = f"expected {', '.join(DEVICES)}, or a YAML file such as `{example}` with one key per line"
    if not path.is_file():
        raise UserError(f"--device: {name!r} is neither a known device nor a file; {expected}")
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.safe_load(file.read(MAX_FILE_SIZE))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--device: cannot read {name}: {str(error).splitlines()[0]}; {expected}") from error
    if not isinstance(values, dict):
        raise UserError(f"--device: {name} is not a mapping; {expected}")
    unknown = set(values) - {field.name for field in fields(Device)}
    if unknown:
        listed = ", ".join(sorted(map(str, unknown)))
        raise UserError(f"--device: {name} has the unknown keys {listed}; {expected}")
    if "memory_gb" not in values:
        raise UserError(f"--device: {name} has no memory_gb; {expected}")

    for key, value in values.items():
        is_count = key == "per_node"
        is_number = isinstance(value, int if is_count else int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1e9:
            kind = "an integer" if is_count else "a number"
            raise UserError(f"--device: {name}: {key} is {value!r}; expected {kind} between 0 and 1e9")
    return Device(**values)
