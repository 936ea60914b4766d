"""What every engine must do: one pytest suite, run on each implementation of the port.

Subclass it and give a fresh engine that was not bound yet:

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def subject(self): yield Subject(engine=..., weights=..., url=...)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import pytest

from stitch.codec import DigestState, TensorUpdate, UpdateSet
from stitch.engines.port import CommitReceipt, Engine
from stitch.errors import BaseMismatchError, EngineError, SchemaMismatchError
from stitch.tensors import HostWeights
from stitch.types import VersionRef

BASE = VersionRef("contract", 0)
NEXT = VersionRef("contract", 1)
AFTER = VersionRef("contract", 2)
NUM_TOKENS = 400
DEADLINE_S = 60.0


@dataclass(kw_only=True)
class Subject:
    """An engine, a private copy of the weights it holds, and where it answers requests.

    With `url`, the suite asks for streams of NUM_TOKENS tokens and commits meanwhile: they must
    take long enough for that.
    """

    engine: Engine
    weights: HostWeights
    url: str | None = None

    @property
    def digest(self) -> str:
        return DigestState.of(self.weights).version_digest()


def flip_update(weights: HostWeights, seed: int, per_tensor: int = 5) -> UpdateSet:
    """Change the lowest bit of a few words of every tensor: always another, never a wild value."""
    rng = np.random.default_rng(seed)
    updates = []
    for index, spec in enumerate(weights.schema.tensors):
        count = min(per_tensor, spec.num_words)
        if not count:
            continue
        positions = np.sort(rng.choice(spec.num_words, count, replace=False)).astype(np.int64)
        old = weights.words_at(index)[positions]
        new = old ^ old.dtype.type(1)
        updates.append(TensorUpdate(tensor=index, positions=positions, new=new, old=old))
    return UpdateSet(updates)


def dense_update(weights: HostWeights) -> UpdateSet:
    """Flip the lowest bit of every word, as ranges without positions."""
    updates = []
    for index, spec in enumerate(weights.schema.tensors):
        if spec.num_words:
            old = weights.words_at(index).copy()
            new = old ^ old.dtype.type(1)
            updates.append(TensorUpdate(tensor=index, positions=None, start=0, new=new, old=old))
    return UpdateSet(updates)


class EngineContract:
    """The tests. `subject` is fresh for each of them; the first two find it never bound."""

    @pytest.fixture
    async def subject(self) -> Subject:
        raise NotImplementedError("give a fresh engine in your subclass")

    async def test_an_engine_is_not_labelled_before_it_is_bound(self, subject: Subject) -> None:
        it = await subject.engine.describe()
        assert it.ref is None
        assert it.state == "ready"
        assert it.schema_digest == subject.weights.schema.digest

    async def test_answers_before_the_first_bind_carry_no_version(self, subject: Subject) -> None:
        url = _url_of(subject)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=_request(num_tokens=3)) as response,
        ):
            assert "X-Stitch-Version-Start" not in response.headers
            body = await response.json()
        assert body["weight_version_start"] is None
        assert body["choices"][0]["weight_versions"] == []

    async def test_binding_to_another_digest_is_refused(self, subject: Subject) -> None:
        with pytest.raises(BaseMismatchError, match=subject.digest):
            await subject.engine.bind(BASE, "0" * 32)
        assert (await subject.engine.describe()).ref is None

    async def test_binding_to_the_real_digest_labels_the_weights(self, subject: Subject) -> None:
        await subject.engine.bind(NEXT, subject.digest)
        assert (await subject.engine.describe()).ref == NEXT

    async def test_nothing_can_be_staged_before_binding(self, subject: Subject) -> None:
        with pytest.raises(EngineError):
            await subject.engine.stage("a", BASE, NEXT, flip_update(subject.weights, 1))

    async def test_a_commit_makes_exactly_the_staged_words_live(self, subject: Subject) -> None:
        update = flip_update(subject.weights, 1)
        await _bind(subject)
        await subject.engine.stage("a", BASE, NEXT, update)
        staged = await subject.engine.describe()
        assert (staged.ref, staged.staged, staged.staged_target) == (BASE, "a", NEXT)
        receipt = await subject.engine.commit("a")
        assert (receipt.ref, receipt.num_changed) == (NEXT, update.num_changed)
        assert receipt.pause_ms >= 0
        update.apply(subject.weights)
        await _holds(subject, NEXT)
        after = await subject.engine.describe()
        assert (after.ref, after.staged, after.committed) == (NEXT, None, "a")

    async def test_a_stage_changes_nothing_that_is_served(self, subject: Subject) -> None:
        await _bind(subject)
        await subject.engine.stage("a", BASE, NEXT, flip_update(subject.weights, 1))
        await _holds(subject, BASE)

    async def test_every_word_can_be_rewritten_at_once(self, subject: Subject) -> None:
        update = dense_update(subject.weights)
        await _commit(subject, "a", update)
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_a_version_without_changes_moves_the_label(self, subject: Subject) -> None:
        receipt = await _commit(subject, "a", UpdateSet([]))
        assert receipt.num_changed == 0
        await _holds(subject, NEXT)

    async def test_a_stage_from_another_version_is_refused(self, subject: Subject) -> None:
        await _bind(subject)
        with pytest.raises(EngineError):
            await subject.engine.stage("a", NEXT, AFTER, flip_update(subject.weights, 1))
        await _holds(subject, BASE)

    async def test_a_stage_whose_old_bits_are_not_live_is_refused(self, subject: Subject) -> None:
        await _bind(subject)
        good = flip_update(subject.weights, 1).updates[0]
        lie = TensorUpdate(
            tensor=good.tensor,
            positions=good.positions,
            new=good.new,
            old=good.old ^ good.old.dtype.type(2),
        )
        with pytest.raises(EngineError, match=subject.weights.schema.tensors[0].name):
            await subject.engine.stage("a", BASE, NEXT, UpdateSet([lie]))
        await _nothing_staged(subject)

    async def test_a_stage_beyond_a_tensors_end_is_refused(self, subject: Subject) -> None:
        await _bind(subject)
        spec = subject.weights.schema.tensors[0]
        words = np.zeros(1, subject.weights.words_at(0).dtype)
        wild = TensorUpdate(
            tensor=0,
            positions=np.array([spec.num_words]),
            new=words + words.dtype.type(1),
            old=words,
        )
        # Some transports refuse it before the engine sees it: any error of ours will do.
        with pytest.raises((EngineError, ValueError)):
            await subject.engine.stage("a", BASE, NEXT, UpdateSet([wild]))
        await _nothing_staged(subject)

    async def test_a_failed_stage_does_not_keep_the_next_from_working(
        self, subject: Subject
    ) -> None:
        await _bind(subject)
        with pytest.raises(EngineError):
            await subject.engine.stage("a", NEXT, AFTER, UpdateSet([]))
        update = flip_update(subject.weights, 2)
        await subject.engine.stage("b", BASE, NEXT, update)
        await subject.engine.commit("b")
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_a_later_stage_replaces_an_earlier_one(self, subject: Subject) -> None:
        await _bind(subject)
        second = flip_update(subject.weights, 2)
        await subject.engine.stage("a", BASE, NEXT, flip_update(subject.weights, 1))
        await subject.engine.stage("b", BASE, AFTER, second)
        with pytest.raises(EngineError):
            await subject.engine.commit("a")
        receipt = await subject.engine.commit("b")
        assert receipt.ref == AFTER
        second.apply(subject.weights)
        await _holds(subject, AFTER)

    async def test_staging_the_same_again_is_harmless(self, subject: Subject) -> None:
        update = flip_update(subject.weights, 1)
        await _bind(subject)
        await subject.engine.stage("a", BASE, NEXT, update)
        await subject.engine.stage("a", BASE, NEXT, update)
        await subject.engine.commit("a")
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_committing_an_unknown_stage_is_refused(self, subject: Subject) -> None:
        await _bind(subject)
        with pytest.raises(EngineError, match="nope"):
            await subject.engine.commit("nope")
        await _holds(subject, BASE)

    async def test_committing_twice_gives_the_same_receipt(self, subject: Subject) -> None:
        first = await _commit(subject, "a", flip_update(subject.weights, 1))
        assert await subject.engine.commit("a") == first

    async def test_commits_at_the_same_time_each_get_their_own_outcome(
        self, subject: Subject
    ) -> None:
        update = flip_update(subject.weights, 1)
        await _bind(subject)
        await subject.engine.stage("a", BASE, NEXT, update)
        outcomes = await asyncio.gather(
            subject.engine.commit("a"),
            subject.engine.commit("b"),
            subject.engine.commit("a"),
            return_exceptions=True,
        )
        assert isinstance(outcomes[1], EngineError)
        assert isinstance(outcomes[0], CommitReceipt)
        assert outcomes[0] == outcomes[2]
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_a_discarded_stage_cannot_be_committed(self, subject: Subject) -> None:
        await _bind(subject)
        await subject.engine.stage("a", BASE, NEXT, flip_update(subject.weights, 1))
        await subject.engine.discard()
        await subject.engine.discard()
        with pytest.raises(EngineError):
            await subject.engine.commit("a")
        await _nothing_staged(subject)

    async def test_rolling_back_restores_bits_and_label(self, subject: Subject) -> None:
        await _commit(subject, "a", flip_update(subject.weights, 1))
        await subject.engine.roll_back(BASE)
        await _holds(subject, BASE)
        assert (await subject.engine.describe()).committed is None
        with pytest.raises(EngineError):
            await subject.engine.roll_back(BASE)

    async def test_after_rolling_back_the_same_version_can_be_committed_again(
        self, subject: Subject
    ) -> None:
        update = flip_update(subject.weights, 1)
        await _commit(subject, "a", update)
        await subject.engine.roll_back(BASE)
        await subject.engine.stage("b", BASE, NEXT, update)
        await subject.engine.commit("b")
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_rolling_back_elsewhere_is_refused(self, subject: Subject) -> None:
        update = flip_update(subject.weights, 1)
        await _commit(subject, "a", update)
        with pytest.raises(EngineError):
            await subject.engine.roll_back(AFTER)
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_the_next_stage_ends_the_roll_back(self, subject: Subject) -> None:
        first = flip_update(subject.weights, 1)
        await _commit(subject, "a", first)
        first.apply(subject.weights)
        await subject.engine.stage("b", NEXT, AFTER, flip_update(subject.weights, 2))
        with pytest.raises(EngineError):
            await subject.engine.roll_back(BASE)
        await _holds(subject, NEXT)

    async def test_binding_drops_what_was_staged_under_the_old_label(
        self, subject: Subject
    ) -> None:
        await _bind(subject)
        await subject.engine.stage("a", BASE, NEXT, flip_update(subject.weights, 1))
        await subject.engine.bind(VersionRef("other", 3), subject.digest)
        with pytest.raises(EngineError):
            await subject.engine.commit("a")
        await _holds(subject, VersionRef("other", 3))

    async def test_an_answer_in_flight_goes_on_over_a_commit_and_says_where(
        self, subject: Subject
    ) -> None:
        url = _url_of(subject)
        await _bind(subject)
        update = flip_update(subject.weights, 1)
        await subject.engine.stage("a", BASE, NEXT, update)
        async with _Stream(url) as events:
            await anext(events)
            await subject.engine.commit("a")
            rest = [event async for event in events]
        stamp = next(event for event in rest if event.get("object") == "stitch.versions")
        assert (stamp["weight_version_start"], stamp["weight_version_end"]) == (0, 1)
        (spans,) = stamp["weight_versions"]
        assert [span["version"] for span in spans] == [0, 1]
        assert (spans[0]["start"], spans[1]["end"]) == (0, NUM_TOKENS)
        assert 0 < spans[0]["end"] == spans[1]["start"] < NUM_TOKENS
        update.apply(subject.weights)
        await _holds(subject, NEXT)

    async def test_verifying_while_an_answer_is_streamed_finds_the_live_version(
        self, subject: Subject
    ) -> None:
        url = _url_of(subject)
        await _bind(subject)
        async with _Stream(url) as events:
            await anext(events)
            await _holds(subject, BASE)
            assert len([event async for event in events]) > 0

    async def test_some_tensors_can_be_verified_alone(self, subject: Subject) -> None:
        await _bind(subject)
        state, schema = DigestState.of(subject.weights), subject.weights.schema
        wanted = [schema.tensors[-1].name, schema.tensors[0].name]
        report = await subject.engine.verify(wanted)
        assert (report.ref, report.digest) == (BASE, "")
        assert report.tensors == {n: state.tensor_digest(schema.index[n]) for n in wanted}
        with pytest.raises(SchemaMismatchError, match=r"no\.such"):
            await subject.engine.verify(["no.such"])
        await _holds(subject, BASE)

    async def test_a_plain_answer_carries_versions_in_body_and_headers(
        self, subject: Subject
    ) -> None:
        url = _url_of(subject)
        await subject.engine.bind(AFTER, subject.digest)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=_request(num_tokens=3)) as response,
        ):
            assert response.status == 200
            headers, body = response.headers, await response.json()
        assert headers["X-Stitch-Version-Start"] == headers["X-Stitch-Version-End"] == "2"
        assert (body["weight_version_start"], body["weight_version_end"]) == (2, 2)
        (choice,) = body["choices"]
        assert choice["weight_versions"] == [{"version": 2, "start": 0, "end": 3}]


async def _bind(subject: Subject) -> None:
    await subject.engine.bind(BASE, subject.digest)


async def _commit(subject: Subject, stage_id: str, update: UpdateSet) -> CommitReceipt:
    """Bind to BASE, stage and commit NEXT."""
    await _bind(subject)
    await subject.engine.stage(stage_id, BASE, NEXT, update)
    return await subject.engine.commit(stage_id)


async def _holds(subject: Subject, ref: VersionRef) -> None:
    """The engine is labelled `ref` and really holds what `subject.weights` holds."""
    report = await subject.engine.verify()
    state = DigestState.of(subject.weights)
    assert report.ref == ref
    assert report.digest == state.version_digest()
    specs = subject.weights.schema.tensors
    assert report.tensors == {spec.name: state.tensor_digest(i) for i, spec in enumerate(specs)}


async def _nothing_staged(subject: Subject) -> None:
    it = await subject.engine.describe()
    assert (it.ref, it.staged) == (BASE, None)
    await _holds(subject, BASE)


def _url_of(subject: Subject) -> str:
    if subject.url is None:
        pytest.skip("this subject answers no requests")
    return subject.url


def _request(*, num_tokens: int, stream: bool = False) -> dict[str, Any]:
    return {
        "prompt": "1+2=",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


class _Stream:
    """`async with _Stream(url) as events`: the events of one streamed completion."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S))

    async def __aenter__(self) -> AsyncIterator[dict[str, Any]]:
        body = _request(num_tokens=NUM_TOKENS, stream=True)
        self._response = await self._session.post(self._url, json=body)
        assert self._response.status == 200, await self._response.text()
        return self._events()

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        async for line in self._response.content:
            if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                yield json.loads(line[5:])

    async def __aexit__(self, *_: object) -> None:
        self._response.close()
        await self._session.close()
