"""Combine samples of any length into packs of at most `pack_tokens` tokens.

Nearly all packs are exactly full. The packs depend only on the samples and their order. Samples with a `batch_shape`
are packed only with samples of the same shape.
"""

from collections.abc import Sequence

from omnizoo.data.sample import Sample

WINDOW = 256  # default number of samples in the window
GROWTH = 32  # the default window starts with this number of samples, and each pack adds the same number


class Packer:
    """Selects the samples of each pack from a window of samples.

    A pack consists of the oldest sample in the window, and of other samples that best fill the remaining space.
    If several choices fill it equally well, older samples are preferred. A sample waits for at most as many packs as
    the window has samples.

    By default, the window starts small and grows with every pack, because a run cannot start before every lane has
    produced its first packs.

    Args:
        pack_tokens: Maximum number of tokens of a pack.
        look_ahead: Number of samples in the window. By default, it has `WINDOW` samples, or more if these would not
            fill two packs.
        packs: Number of packs that were produced before a resume.
    """

    def __init__(self, pack_tokens: int, look_ahead: int | None = None, packs: int = 0) -> None:
        self.pack_tokens = pack_tokens
        self.look_ahead = look_ahead
        self.packs = packs  # number of packs produced so far
        self.tokens = 0  # number of tokens in the window
        self.buffer: list[Sample] = []

    @property
    def is_ready(self) -> bool:
        """Whether the window has enough samples for the next pack."""
        if self.look_ahead is not None:
            return len(self.buffer) >= self.look_ahead
        window = min(WINDOW, GROWTH * (1 + self.packs))
        return len(self.buffer) >= window and self.tokens >= 2 * self.pack_tokens

    def add(self, sample: Sample) -> None:
        """Add a sample to the window."""
        assert 0 < len(sample) <= self.pack_tokens, "over-long samples are split or dropped before"
        self.buffer.append(sample)
        self.tokens += len(sample)

    def pop(self) -> list[Sample]:
        """Remove the samples of the next pack from the window and return them."""
        oldest = self.buffer[0]
        later = range(1, len(self.buffer))
        candidates = [i for i in later if self.buffer[i].batch_shape == oldest.batch_shape]
        lengths = [len(self.buffer[i]) for i in candidates]
        others = best_fill(lengths, self.pack_tokens - len(oldest))
        chosen = [0, *(candidates[i] for i in others)]
        samples = [self.buffer[i] for i in chosen]
        for i in reversed(chosen):
            del self.buffer[i]
        self.packs += 1
        self.tokens -= sum(map(len, samples))
        return samples

    def pop_oldest(self, count: int) -> list[Sample]:
        """Remove the `count` oldest samples from the window and return them; fewer if the window has fewer."""
        samples = self.buffer[:count]
        del self.buffer[:count]
        self.tokens -= sum(map(len, samples))
        return samples


def pack_samples(samples: Sequence[Sample], pack_tokens: int) -> list[list[int]]:
    """Combine all samples into packs, and return the indices of the samples of each pack, in ascending order.

    As in `Packer`, each pack consists of the first remaining sample and of those that fill the rest of the pack best.
    """
    remaining = list(range(len(samples)))
    packs = []
    while remaining:
        first, *others = remaining
        room = pack_tokens - len(samples[first])
        chosen = {others[i] for i in best_fill([len(samples[i]) for i in others], room)} | {first}
        packs.append(sorted(chosen))
        remaining = [i for i in others if i not in chosen]
    return packs


def best_fill(lengths: list[int], room: int) -> list[int]:
    """Choose lengths whose sum is as large as possible, but at most `room`.

    This is the subset sum problem. An integer represents the set of reachable sums: bit n is set if some subset sums to
    n. One shift adds a length to all subsets and takes about a microsecond. The search stops as soon as `room` is
    filled exactly.

    Returns:
        The indices of the chosen lengths, in ascending order.
    """
    if sum(lengths) <= room:
        return list(range(len(lengths)))
    up_to_room = (1 << (room + 1)) - 1
    reachable = [1]
    for length in lengths:
        sums = reachable[-1]
        if sums >> room:
            break
        reachable.append((sums | sums << length) & up_to_room)

    remaining = reachable[-1].bit_length() - 1
    chosen = []
    for i in range(len(reachable) - 2, -1, -1):
        if not reachable[i] >> remaining & 1:  # this sum needs sample i
            chosen.append(i)
            remaining -= lengths[i]
    return chosen[::-1]
