"""Write examples/sensor/series.jsonl: rows that continue, name or generate waves. The output is deterministic.

python examples/sensor/make_rows.py
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SHAPES = {"sine": np.sin, "square": lambda x: np.sign(np.sin(x)), "saw": lambda x: (x / np.pi) % 2 - 1}


def turn(role: str, *content: str | list[float]) -> dict[str, object]:
    """Return a message whose content has strings as text parts and lists as series parts."""
    parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": "series", "series": c} for c in content]
    return {"role": role, "content": parts}


def main() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(240):
        shape = list(SHAPES)[rng.integers(3)]
        phases = np.arange(64) * rng.uniform(0.2, 0.5) + rng.uniform(0, 6)
        values = np.round(SHAPES[shape](phases) + rng.normal(0, 0.02, 64), 3)
        prefix = values[: 8 * rng.integers(2, 7)].tolist()
        if number % 3 == 0:
            messages = [turn("user", "which wave ", prefix), turn("assistant", shape)]
        elif number % 3 == 1:
            continuation = values[len(prefix) : len(prefix) + 16].tolist()
            messages = [turn("user", "go on ", prefix), turn("assistant", continuation)]
        else:
            messages = [turn("user", f"a {shape} wave"), turn("assistant", "here ", values[:16].tolist())]
        rows.append({"messages": messages})
    (HERE / "series.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
