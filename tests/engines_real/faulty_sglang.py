"""A plugin of SGLang's that puts faults into the ranks of ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from faults import with_faults

from stitch.engines.ranks.port import Answer


def register() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from stitch.engines.sglang.scheduler import SchedulerRank

    answer = SchedulerRank.answer

    def faulty(rank: SchedulerRank, number: int, method: str, args: Sequence[Any]) -> Answer:
        return with_faults(
            rank._rank, method, rank.weights, lambda: answer(rank, number, method, args)
        )

    SchedulerRank.answer = faulty  # type: ignore[method-assign]
