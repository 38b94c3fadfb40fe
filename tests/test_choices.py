"""Routers whose choice rounding can turn: which tokens have a tie, and what `verify` makes of it."""

from dataclasses import replace

import torch

from omnizoo.models.routing import RouterRecord
from omnizoo.verification.choices import Choices, Chosen, first_turned, tied
from omnizoo.verification.compare import TOLERANCE, Verdict, compare
from omnizoo.verification.trial import Trial


def record(scores: list[list[float]], chosen: list[list[int]]) -> RouterRecord:
    return RouterRecord("layers.0.router", torch.tensor(scores, dtype=torch.float64), torch.tensor(chosen))


def test_a_tie_is_a_choice_between_scores_nearer_than_rounding() -> None:
    near = record([[0.5, 0.3, 0.3 - 1e-7, 0.1], [0.5, 0.3, 0.2, 0.1]], [[0, 1], [1, 0]])
    assert tied(near, 1e-5) == 1
    assert tied(near, 1e-8) == 0
    # Equal scores that are both chosen, or both left out, decide nothing.
    assert tied(record([[0.5, 0.5, 0.1, 0.1]], [[0, 1]]), 1e-5) == 0
    # Not the highest scores: chosen by another rule, of which nothing is known here.
    assert tied(record([[0.5, 0.3, 0.3 - 1e-7, 0.1]], [[0, 2]]), 1e-5) == 0


def test_choices_of_ranks_add_up() -> None:
    one, other = Choices(1e-5), Choices(1e-5)
    one.add([record([[0.5, 0.3, 0.3 - 1e-7, 0.1]], [[0, 1]])])
    other.add([record([[0.1, 0.2, 0.3, 0.4]], [[3, 2]])])
    total = [a + b for a, b in zip(one.numbers(), other.numbers(), strict=True)]
    assert one.chosen(total) == Chosen({"layers.0.router": [1, 1, 1, 1]}, {"layers.0.router": 1})


def test_the_first_choice_that_differs_must_have_a_tie() -> None:
    reference = [Chosen({"a": [2, 2], "b": [1, 3]}, {"a": 0, "b": 1})] * 2
    assert first_turned(reference, reference) is None
    turned = [reference[0], Chosen({"a": [2, 2], "b": [2, 2]}, {"a": 0, "b": 1})]
    assert first_turned(turned, reference) == (1, "b")
    # What comes after a difference without a tie explains nothing.
    assert first_turned([Chosen({"a": [1, 3], "b": [2, 2]}, {"a": 0, "b": 1})] * 2, reference) is None


def test_a_failure_says_whether_a_router_turned_and_a_pass_does_not() -> None:
    def verdict(loads: list[float], loss: float) -> Verdict:
        own = replace(reference, losses=[loss], chosen=[Chosen({"router": loads}, {"router": 1})])
        return compare(own, reference, "dp4", TOLERANCE["fp32"])

    gradients = {"weight": torch.ones(3)}
    ties = [Chosen({"router": [2, 2]}, {"router": 1})]
    reference = Trial([1.0], [1.0], [4], gradients, {}, [], {}, {}, chosen=ties)
    assert verdict([1, 3], 1.1).turned == "in step 1, router has 1 of them and chooses otherwise"
    assert verdict([2, 2], 1.1).turned == ""
    assert verdict([1, 3], 1.0).passed
