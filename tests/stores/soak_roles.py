"""The processes of the soak: a trainer and replicas, small enough for many of them on few cores.

They are forked from a server process that has imported everything and used nothing, write what they
were told to files, and may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from stitch import failpoints
from stitch.board import Run, open_board
from stitch.errors import StitchError
from stitch.mirror import Mirror
from stitch.publish import Publisher, RetryPolicy
from stitch.records import Heartbeat
from stitch.tensors import HostWeights, open_checkpoint
from stitch.testing.published import copy_of, digest_of
from stitch.testing.synthetic import adam_step, synthetic_schema, synthetic_weights
from stitch.types import ReplicaState

RUN = "soak"
DENSITY = 0.02
ANCHOR_EVERY = 40
POLL_S = 0.1
RETRY = RetryPolicy(max_attempts=8, first_delay_s=0.05, max_delay_s=1.0)


def base_weights() -> HostWeights:
    return synthetic_weights(synthetic_schema(hidden=12, layers=1))


def train(weights: HostWeights, version: int) -> None:
    """One step in place: what `version` holds follows from what the one before it held."""
    adam_step(weights, DENSITY, seed=version)


def expected_digests(num_versions: int) -> list[str]:
    weights = base_weights()
    digests = [digest_of(weights)]
    for version in range(1, num_versions + 1):
        train(weights, version)
        digests.append(digest_of(weights))
    return digests


def trainer(
    url: str, environment: dict[str, str], base: str, told: str, failpoint: str, newest: int
) -> None:
    """Publish from wherever the run stands up to `newest`; says in `told` what was published."""
    os.environ.update(environment | {"STITCH_FAILPOINT": failpoint})
    importlib.reload(failpoints)
    publisher = _opened(url, base)
    with publisher, Path(told).open("a", buffering=1, encoding="ascii") as file:
        file.write("up\n")
        weights = copy_of(publisher._pipeline.baseline.weights)
        while publisher.ref.version < newest:
            version = publisher.ref.version + 1
            train(weights, version)
            ref = publisher.publish(weights, step=version).wait(60.0)
            file.write(f"published {ref.version}\n")


def _opened(url: str, base: str) -> Publisher:
    return Publisher.open(
        url, RUN, base, "checkpoint", threads=1, retry=RETRY, anchor_every=ANCHOR_EVERY
    )


def replica(
    url: str, environment: dict[str, str], base: str, held: str, name: str, from_anchor: bool
) -> None:
    """Follow the run for ever; says in `held` which version it holds, and the digest of its words.

    `from_anchor`: start from the newest anchor, where there is one, instead of from the base.
    """
    os.environ.update(environment)
    boot = f"{os.getpid():x}"
    with Path(held).open("a", buffering=1, encoding="ascii") as file:
        for seq, mirror in enumerate(_followed(url, base, from_anchor), 1):
            assert mirror.ref is not None
            file.write(f"{mirror.ref.version} {digest_of(mirror.weights)}\n")
            beat = _beat(name, boot, seq, mirror.ref.version)
            with contextlib.suppress(StitchError):
                open_board(url).open_run(RUN).put_heartbeat(beat)


def _followed(url: str, base: str, from_anchor: bool) -> Iterator[Mirror]:
    """The mirror, whenever it has moved."""
    mirror: Mirror | None = None
    run: Run | None = None
    while True:
        try:
            run = run or open_board(url).open_run(RUN)
            if mirror is None:
                mirror = _booted(run, base, from_anchor)
                yield mirror
            assert mirror.ref is not None
            before = mirror.ref.version
            mirror.advance(run, threads=1)
            if mirror.ref.version != before:
                yield mirror
        except StitchError:  # the store fails by plan; what counts is what is held in the end
            pass
        time.sleep(POLL_S)


def _booted(run: Run, base: str, from_anchor: bool) -> Mirror:
    anchors = run.anchors() if from_anchor else []
    if anchors:
        record = run.anchor(anchors[-1])
        assert record is not None
        return Mirror.from_anchor(run, record)
    with open_checkpoint(base) as checkpoint:
        mirror = Mirror.load(checkpoint, threads=1)
    mirror.identify(run)
    return mirror


def _beat(name: str, boot: str, seq: int, applied: int) -> Heartbeat:
    return Heartbeat(
        replica=name,
        run=RUN,
        url="http://127.0.0.1:9",
        region="local",
        state=ReplicaState.SERVING,
        applied=applied,
        newest_seen=applied,
        ready=True,
        reason="",
        last_error="",
        boot=boot,
        seq=seq,
        sent_unix_s=time.time(),
        versions=(),
    )
