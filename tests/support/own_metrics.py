"""Metrics of a user's own, and mistakes that one may be."""

from omnizoo import Answer

seen: list[Answer] = []


def length(answer: Answer, most: int = 1000) -> float:
    seen.append(answer)
    return min(len(answer.text), most)


def raises(answer: Answer) -> float:
    if "second" in answer.question:
        raise KeyError("no score")
    return 1.0


def words(answer: Answer) -> str:
    return answer.text


def odd(answer: Answer, other: int) -> float:
    return other


NUMBER = 3
