"""The trainer process: GRPO on FP32 weights, rollouts one step ahead, a version a step.

`python -m stitch.demo.trainer PLAN.json`, where the plan is a :class:`TrainerPlan`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path

import torch

from stitch.board import open_board
from stitch.client import Client
from stitch.demo.events import EventWriter
from stitch.demo.grpo import Learner
from stitch.demo.master import load_model, spread, view_digest
from stitch.demo.rollouts import Asked, Rollouts, ask, collect
from stitch.demo.settings import TrainerPlan
from stitch.demo.task import problems
from stitch.errors import BaseMismatchError, NoReplicaError
from stitch.publish import Publisher, Ticket

POLL_S = 0.2


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    plan = TrainerPlan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.seed)
    Trainer(plan).run()
    return 0


class Trainer:
    """One training run from base to the last published version."""

    def __init__(self, plan: TrainerPlan) -> None:
        self._plan = plan
        self._events = EventWriter(Path(plan.events))
        self._board = open_board(plan.board)
        model, self._tokenizer = load_model(Path(plan.model))
        spread(model.parameters(), plan.seed)
        pad = self._tokenizer.pad_token_id
        self._learner = Learner(model, self._tokenizer.eos_token_id or 0 if pad is None else pad)

    def run(self) -> None:
        plan = self._plan
        with Publisher.start(
            self._board, plan.run, plan.model, view="bf16", threads=plan.threads
        ) as publisher:
            self._prove_base()
            with Client(self._board, plan.run, refresh_s=0.5) as client:
                self._wait_for_replicas(client)
                newest = self._train(publisher, client)
        self._events.emit("final", version=newest, digest=self._digest())

    def _train(self, publisher: Publisher, client: Client) -> int:
        """Until the plan's steps are done; returns the newest version."""
        newest = 0
        ticket: Ticket | None = None
        asked = self._ask(client, step=1, newest=0)
        for step in range(1, self._plan.max_steps + 1):
            began_s = time.monotonic()
            rollouts = collect(asked)
            if ticket is not None:
                newest = ticket.wait(timeout_s=self._plan.deadline_s).version
            last = step >= self._plan.steps and self._told_enough()
            last = last or step == self._plan.max_steps
            if not last:
                asked = self._ask(client, step=step + 1, newest=newest)
            ticket = self._step(publisher, step, rollouts, began_s)
            if last:
                break
            self._linger(began_s)
        assert ticket is not None
        return ticket.wait(timeout_s=self._plan.deadline_s).version

    def _ask(self, client: Client, *, step: int, newest: int) -> list[Asked]:
        plan = self._plan
        return ask(
            client,
            self._tokenizer,
            problems(step, plan.num_problems, plan.seed),
            group_size=plan.group_size,
            max_tokens=plan.max_tokens,
            min_version=max(0, newest - 1),
            deadline_s=plan.deadline_s,
            seed=plan.seed + step,
        )

    def _step(self, publisher: Publisher, step: int, rollouts: Rollouts, began_s: float) -> Ticket:
        waited_s = time.monotonic() - began_s
        stats = self._learner.step(rollouts.samples)
        ticket = publisher.publish(self._learner.model, step=step)
        self._events.emit(
            "step",
            step=step,
            reward=rollouts.mean_reward,
            accuracy=rollouts.accuracy,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            clip_share=stats.clip_share,
            num_tokens=stats.num_tokens,
            sample_versions=rollouts.versions,
            requests=rollouts.num_requests,
            retried=rollouts.retried,
            spanning=rollouts.spanning,
            waited_s=waited_s,
            seconds=time.monotonic() - began_s,
            example=rollouts.samples[0].text[:80],
        )
        return ticket

    def _wait_for_replicas(self, client: Client) -> None:
        """Until the first replicas are ready. The supervisor notices it if one dies instead."""
        deadline_s = time.monotonic() + self._plan.deadline_s
        while sum(replica.ready for replica in client.replicas()) < self._plan.num_replicas:
            if time.monotonic() > deadline_s:
                raise NoReplicaError(
                    f"{self._plan.num_replicas} replicas were not ready within "
                    f"{self._plan.deadline_s:.0f} s: {client.replicas()}"
                )
            threading.Event().wait(POLL_S)

    def _told_enough(self) -> bool:
        return Path(self._plan.enough).exists()

    def _linger(self, began_s: float) -> None:
        threading.Event().wait(max(0.0, self._plan.min_step_s - (time.monotonic() - began_s)))

    def _digest(self) -> str:
        return view_digest(self._learner.model, self._board.open_run(self._plan.run).schema)

    def _prove_base(self) -> None:
        """Version 0 must be what the FP32 weights round to, or the run would start with a lie."""
        expected, found = self._board.open_run(self._plan.run).record.base_digest, self._digest()
        if found != expected:
            raise BaseMismatchError(
                f"the trainer's weights round to digest {found}, the run's base has {expected}"
            )
        self._events.emit("started", digest=found, num_parameters=self._num_parameters())

    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._learner.model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
