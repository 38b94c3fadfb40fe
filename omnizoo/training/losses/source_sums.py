"""Split the sum of a loss by data source, for the metrics `loss/SOURCE`."""

import torch

from omnizoo.ops.precision import at_least_fp32


class SourceSums:
    """The sums of the losses of a micro-batch, split by source.

    A loss passes its sum and the summands to `add`. `pop` then returns the split of that sum: one value for each
    source, followed by 1 if the loss did not split its sum, otherwise by 0.

    Args:
        num_sources: Number of sources. With 1, nothing is split.
        source_of_sample: `[samples]`, index in `data.sources` of each sample; None if nothing is split.
    """

    def __init__(self, num_sources: int = 1, source_of_sample: torch.Tensor | None = None) -> None:
        self.num_sources = num_sources
        self.source_of_sample = source_of_sample
        self._splits: list[tuple[torch.Tensor, torch.Tensor]] = []  # (total, [sources + 1])

    def buffer(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return an empty tensor for the summands of `rows`, in fp32 or better; None if nothing is split."""
        if self.source_of_sample is None:
            return None
        return at_least_fp32(rows.new_empty(len(rows)))

    def add(self, total: torch.Tensor, values: torch.Tensor, samples: torch.Tensor) -> None:
        """Split a sum by source.

        Args:
            total: The sum, a scalar.
            values: `[n]`, its summands.
            samples: `[n]`, the sample number of each summand.
        """
        if self.source_of_sample is not None:
            self._splits.append((total, self.split(values, self.source_of_sample[samples])))

    def put(self, total: torch.Tensor, split: torch.Tensor | None) -> None:
        """Store the split of a sum, if there is one."""
        if split is not None:
            self._splits.append((total, split))

    def pop(self, total: torch.Tensor, num_targets: int = 0) -> torch.Tensor | None:
        """Return the split of a sum, `[sources + 1]`, and discard all splits. None if nothing is split.

        Args:
            total: The sum.
            num_targets: Number of targets that the loss has on this rank. Without targets, every loss can be split.
        """
        if self.source_of_sample is None:
            return None
        splits = [split for other, split in self._splits if other is total]
        self._splits = []
        if splits:
            return splits[0]
        return self.unsplit(total) if num_targets else total.new_zeros(self.num_sources + 1)

    def split(self, values: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return the sum of the `values [n]` of each source, and 0: `[sources + 1]`."""
        return values.new_zeros(self.num_sources + 1).index_add_(0, sources, values.detach())

    def unsplit(self, total: torch.Tensor) -> torch.Tensor:
        """Return the split of a loss that returns only its sum: zeros, and 1."""
        split = total.new_zeros(self.num_sources + 1)
        split[-1] = 1
        return split
