"""The task and its reward."""

from __future__ import annotations

import pytest

from stitch.demo.task import Problem, is_correct, problems, reward

SUM = Problem(left=18, right=46)


def test_the_same_step_always_has_the_same_problems() -> None:
    assert problems(3, 4, seed=1) == problems(3, 4, seed=1)
    assert problems(3, 4, seed=1) != problems(4, 4, seed=1)


def test_problems_have_two_digits_on_both_sides() -> None:
    for problem in problems(1, 200):
        assert 10 <= problem.left <= 99
        assert 10 <= problem.right <= 99


@pytest.mark.parametrize("text", ["18 + 46 = 64", "64", "It is 064."])
def test_the_sum_as_the_last_number_is_right(text: str) -> None:
    assert is_correct(SUM, text)
    assert reward(SUM, text, 5) > 0.98


@pytest.mark.parametrize("text", ["", "none", "64 or 65", "18 + 46 = 640", "٦٤"])
def test_anything_else_is_wrong(text: str) -> None:
    assert not is_correct(SUM, text)
    assert reward(SUM, text, 5) < 0.5


def test_a_near_miss_earns_more_than_a_far_one_and_both_more_than_no_number() -> None:
    near, far, none = (reward(SUM, f"it is {x}", 5) for x in ("62", "11", "so"))
    assert near > far > none


def test_a_longer_answer_earns_less() -> None:
    assert reward(SUM, "64", 10) < reward(SUM, "64", 5)


def test_a_prompt_shows_one_solved_line_and_leaves_the_next_open() -> None:
    assert SUM.prompt == "12 + 35 = 47\n18 + 46 ="
