"""A metric of one's own: is the number in the answer the right one, whatever the words around it?

PYTHONPATH=examples/right_sum omnizoo train examples/right_sum/sums.yaml
PYTHONPATH=examples/right_sum omnizoo eval runs/sums --allow-code right_sum
"""

import re

import omnizoo


def right_sum(answer: omnizoo.Answer) -> bool | None:
    """Of one answer; the metric is the mean over all of them. None leaves an answer out."""
    wanted = re.findall(r"\d+", answer.expected or "")
    return re.findall(r"\d+", answer.text) == wanted if wanted else None
