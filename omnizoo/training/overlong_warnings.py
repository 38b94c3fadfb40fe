"""Warnings about over-long samples: a summary at start-up, then one when each kind first occurs."""

from collections.abc import Iterator, Mapping

from omnizoo.config.schema import Config
from omnizoo.data.loading.loader import ROWS_READ
from omnizoo.data.loading.reader import Reader


class OverlongWarnings:
    """Warnings about over-long samples and samples with few targets, from the counters of the loader."""

    def __init__(self, config: Config, reader: Reader) -> None:
        most, positions = config.data.pack_tokens, reader.most_positions
        self.kinds = {
            "truncated_overlong": f"rows longer than data.pack_tokens ({most}) are cut off",
            "dropped_overlong": f"rows longer than data.pack_tokens ({most}) are left out",
            "split_overlong": f"rows longer than data.pack_tokens ({most}) are cut into pieces",
            "few_targets": f"samples with fewer than data.min_targets ({config.data.min_targets}) targets are left out",
            "beyond_positions": f"samples are longer than the {positions} positions that the model was made for "
            "(max_position_embeddings)",
        }
        self.said: set[str] = set()

    def at_start(self, counters: Mapping[str, int]) -> dict[str, str]:
        """Return a row of the start-up table; empty if no warning applies to the first rows."""
        found = [f"{counters[name]:,} {what}" for name, what in self.kinds.items() if counters.get(name)]
        self.said |= {name for name in self.kinds if counters.get(name)}
        return {"lengths": f"of the first {counters[ROWS_READ]:,} rows:\n" + "\n".join(found)} if found else {}

    def news(self, counters: Mapping[str, int]) -> Iterator[str]:
        """Yield a warning for each kind that occurs for the first time. Metrics contain all later occurrences."""
        for name, what in self.kinds.items():
            if counters.get(name) and name not in self.said:
                self.said.add(name)
                yield f"{counters[name]:,} of {counters[ROWS_READ]:,} {what}; the metric {name} counts them"
