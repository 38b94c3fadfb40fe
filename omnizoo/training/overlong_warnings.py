"""Warnings about over-long samples: a summary at start-up, and a warning the first time that each kind occurs."""

from collections.abc import Iterator, Mapping

from omnizoo.config.schema import Config
from omnizoo.data.loading.loader import ROWS_READ
from omnizoo.data.loading.reader import Reader


class OverlongWarnings:
    """Warnings about over-long samples and samples with few targets, from the counters of the loader."""

    def __init__(self, config: Config, reader: Reader) -> None:
        overlong = f"rows longer than data.pack_tokens ({config.data.pack_tokens})"
        few_targets = f"samples with fewer than data.min_targets ({config.data.min_targets}) targets"
        self._descriptions = {  # keyed by counter
            "truncated_overlong": f"{overlong} are truncated",
            "dropped_overlong": f"{overlong} are dropped",
            "split_overlong": f"{overlong} are split into several samples",
            "few_targets": f"{few_targets} are dropped",
            "beyond_positions": f"samples exceed the {reader.most_positions} positions of the model "
            "(max_position_embeddings)",
        }
        self._reported: set[str] = set()  # counters for which a warning was already returned

    def at_start(self, counters: Mapping[str, int]) -> dict[str, str]:
        """Return a row of the start-up table; empty if no warning applies to the first rows."""
        lines = []
        for name, description in self._descriptions.items():
            if counters.get(name):
                lines.append(f"{counters[name]:,} {description}")
                self._reported.add(name)
        if not lines:
            return {}
        return {"lengths": f"of the first {counters[ROWS_READ]:,} rows:\n" + "\n".join(lines)}

    def new_warnings(self, counters: Mapping[str, int]) -> Iterator[str]:
        """Yield a warning for each kind that occurs for the first time.

        Later occurrences are only counted in metrics.
        """
        for name, description in self._descriptions.items():
            if counters.get(name) and name not in self._reported:
                self._reported.add(name)
                yield f"of {counters[ROWS_READ]:,} rows, {counters[name]:,} {description}; see the metric {name}"
