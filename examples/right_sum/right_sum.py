"""A custom metric: whether the numbers in a response are correct, regardless of the words around them.

PYTHONPATH=examples/right_sum omnizoo train examples/right_sum/sums.yaml
PYTHONPATH=examples/right_sum omnizoo eval runs/sums --allow-code right_sum
"""

import re

import omnizoo


def right_sum(answer: omnizoo.Answer) -> bool | None:
    """Return whether one response is correct. The metric is the mean over all responses; None excludes a response."""
    expected = re.findall(r"\d+", answer.expected or "")
    if not expected:
        return None
    return re.findall(r"\d+", answer.text) == expected
