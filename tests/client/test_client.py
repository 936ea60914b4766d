"""The client against replicas that behave, refuse, break and hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import random
import re
import threading
from dataclasses import replace

import pytest
from aiohttp import web
from client_fakes import LeapingClock, Site, not_ready, status, wait_until

from stitch.client.request import parse_retry_after
from stitch.errors import (
    ConstraintError,
    NoReplicaError,
    RequestFailedError,
    RetryableError,
    UsageError,
)
from stitch.types import VersionSpan


def end_of_a_vain_request(site: Site, clock: LeapingClock, **options: int) -> str:
    """What a request is told at its deadline, which comes when every replica has answered it."""
    client = site.client(deadline_s=1000)
    future = client.submit("/v1/completions", {"prompt": "x"}, **options)
    wait_until(
        lambda: (infos := client.replicas()) and all(info.last_answer for info in infos),
        "every replica was asked",
    )
    clock.leap(1000)
    with pytest.raises(NoReplicaError) as caught:
        future.result(timeout=20)
    return str(caught.value)


def test_an_answer_carries_text_versions_run_and_replica(site: Site) -> None:
    site.replica("a")
    answer = site.client().completions(prompt="hi", max_tokens=4)
    assert answer.texts == ["from a"]
    assert (answer.version_start, answer.version_end) == (5, 5)
    assert (answer.run, answer.replica, answer.attempts) == ("run", "a", 1)


def test_the_engine_gets_the_fields_and_the_constraint_as_a_header(site: Site) -> None:
    fake = site.replica("a")
    client = site.client(token="secret")
    client.completions(prompt="hi", seed=3, min_version=4)
    client.chat(messages=[{"role": "user", "content": "hi"}], exact_version=5)
    first, second = fake.requests
    assert first.path == "/v1/completions"
    assert first.body == {"prompt": "hi", "seed": 3}
    assert first.headers["X-Stitch-Min-Version"] == "4"
    assert first.headers["Authorization"] == "Bearer secret"
    assert second.path == "/v1/chat/completions"
    assert second.headers["X-Stitch-Exact-Version"] == "5"


def test_versions_are_read_from_headers_when_the_body_has_none(site: Site) -> None:
    async def plain(request: web.Request) -> web.StreamResponse:
        stamps = {"X-Stitch-Version-Start": "5", "X-Stitch-Version-End": "6"}
        return web.json_response({"tokens": [1]}, headers=stamps)

    site.replica("a").always = plain
    answer = site.client().ask("/tokenize", {"prompt": "x"})
    assert (answer.version_start, answer.version_end) == (5, 6)
    assert answer.choices == []


def test_spans_say_which_tokens_came_from_which_version(site: Site) -> None:
    async def spanned(request: web.Request) -> web.StreamResponse:
        spans = [{"version": 5, "start": 0, "end": 3}, {"version": 6, "start": 3, "end": 9}]
        message = {"content": "hello"}
        return web.json_response({"choices": [{"message": message, "weight_versions": spans}]})

    site.replica("a").always = spanned
    answer = site.client().chat(messages=[])
    assert answer.texts == ["hello"]
    assert answer.spans() == (VersionSpan(5, 0, 3), VersionSpan(6, 3, 9))


def test_a_replica_on_the_wanted_version_is_preferred(site: Site) -> None:
    behind, ahead = site.replica("behind", applied=4), site.replica("ahead", applied=7)
    client = site.client()
    client.replicas()
    for _ in range(10):
        assert client.completions(prompt="x", min_version=7).replica == "ahead"
    assert (len(behind.requests), len(ahead.requests)) == (0, 10)


def test_a_409_sends_the_request_to_another_replica(site: Site) -> None:
    liar, good = site.replica("liar", applied=7), site.replica("good", applied=7)
    liar.applied = 5
    liar.always = liar.not_on_version
    client = site.client()
    answers = client.map([{"prompt": "x"}] * 12, min_version=7)
    assert {answer.replica for answer in answers} == {"good"}
    assert len(good.requests) == 12


def test_a_lone_replica_that_is_behind_is_asked_again_until_it_caught_up(site: Site) -> None:
    fake = site.replica("a")
    fake.script.extend([fake.not_on_version] * 3)
    fake.applied = 7
    answer = site.client().completions(prompt="x", min_version=7)
    assert answer.attempts == 4


def test_a_long_retry_after_is_cut_short_by_a_heartbeat_that_meets_the_version(
    site: Site,
) -> None:
    async def later(request: web.Request) -> web.StreamResponse:
        site.run.change("a", applied=7)
        fake.applied = 7
        return not_ready(5, 7, retry_after="1000")

    fake = site.replica("a")
    fake.script.append(later)
    assert site.client().completions(prompt="x", min_version=7).attempts == 2


def test_retry_after_is_honoured_and_the_deadline_holds(site: Site, clock: LeapingClock) -> None:
    fake = site.replica("a")
    fake.always = status(503, "draining", Retry_After="30")
    message = end_of_a_vain_request(site, clock)
    assert "a (SERVING, version 5): 503 Refused draining" in message
    assert len(fake.requests) == 1


@pytest.mark.parametrize("code", [502, 503, 504, 429])
def test_busy_and_broken_gateways_are_retried_elsewhere(site: Site, code: int) -> None:
    bad, _ = site.replica("bad"), site.replica("good")
    bad.always = status(code)
    client = site.client()
    assert {a.replica for a in client.map([{"prompt": "x"}] * 8)} == {"good"}


def test_a_dead_replica_costs_no_failed_request(site: Site) -> None:
    site.dead_replica("dead")
    site.replica("good")
    client = site.client()
    assert {a.replica for a in client.map([{"prompt": "x"}] * 20)} == {"good"}


def test_a_connection_that_breaks_before_the_answer_is_retried_elsewhere(site: Site) -> None:
    bad, _ = site.replica("bad"), site.replica("good")
    bad.always = bad.hang_up
    assert {a.replica for a in site.client().map([{"prompt": "x"}] * 8)} == {"good"}


def test_a_body_that_breaks_off_is_retried(site: Site) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"choices"')
        assert request.transport is not None
        request.transport.abort()
        return response

    site.replica("a").script.append(half)
    answer = site.client().completions(prompt="x")
    assert (answer.texts, answer.attempts) == (["from a"], 2)


def test_a_request_that_must_not_be_repeated_is_not(site: Site) -> None:
    fake = site.replica("a")
    fake.script.append(fake.hang_up)
    with pytest.raises(NoReplicaError, match="may or may not have run"):
        site.client().completions(prompt="x", idempotent=False)
    assert len(fake.requests) == 1


def test_a_request_that_must_not_be_repeated_still_moves_on_from_a_refusal(site: Site) -> None:
    site.replica("a").script.append(status(503, Retry_After="0"))
    assert site.client().completions(prompt="x", idempotent=False).attempts == 2


def test_a_slow_attempt_is_given_up_and_made_elsewhere(site: Site) -> None:
    slow, _ = site.replica("slow", applied=6), site.replica("good", applied=5)
    slow.always = slow.hang
    client = site.client(attempt_timeout_s=0.2)
    client.replicas()
    answer = client.completions(prompt="x", deadline_s=20)
    for _ in range(10):
        answer = client.completions(prompt="x")
        assert answer.replica == "good"
    wait_until(lambda: slow.aborted == len(slow.requests), "the slow attempts were aborted")


def test_an_attempt_at_a_replica_whose_heartbeat_stops_is_given_up(site: Site) -> None:
    stuck, good = site.replica("stuck", applied=7), site.replica("good", applied=6)
    stuck.always = stuck.hang
    client = site.client(stale_after_s=0.4)
    client.replicas()
    future = client.submit("/v1/completions", {"prompt": "x"}, min_version=7)
    wait_until(lambda: stuck.requests, "the request reached the stuck replica")
    site.run.change("good", applied=7)
    good.applied = 7
    site.run.frozen.add("stuck")
    assert future.result(timeout=20).replica == "good"


@pytest.mark.parametrize("code", [400, 401, 404, 422, 301])
def test_a_rejected_request_is_not_tried_again(site: Site, code: int) -> None:
    fake = site.replica("a")
    site.replica("b").always = fake.always = status(code, "bad max_tokens")
    with pytest.raises(RequestFailedError, match=f"{code} Refused bad max_tokens") as caught:
        site.client().completions(prompt="x")
    assert caught.value.status == code
    assert json.loads(caught.value.body)["error"]["message"] == "bad max_tokens"
    assert not isinstance(caught.value, RetryableError)


def test_a_request_that_breaks_two_engines_is_rejected(site: Site) -> None:
    fakes = [site.replica(name) for name in "abc"]
    for fake in fakes:
        fake.always = status(500, "CUDA error")
    with pytest.raises(RequestFailedError, match="500 Refused CUDA error"):
        site.client().completions(prompt="x")
    assert sum(len(fake.requests) for fake in fakes) == 2


def test_one_engine_error_is_retried_elsewhere(site: Site) -> None:
    site.replica("a").script.append(status(500))
    assert site.client().completions(prompt="x").attempts == 2


def test_a_success_that_is_no_json_object_is_rejected(site: Site) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>", content_type="text/html")

    site.replica("a").always = page
    with pytest.raises(RequestFailedError, match="not with a JSON object"):
        site.client().completions(prompt="x")


def test_an_answer_from_a_version_that_was_not_allowed_is_not_handed_out(
    site: Site, clock: LeapingClock
) -> None:
    liar = site.replica("liar", applied=7)
    liar.applied = 3
    message = end_of_a_vain_request(site, clock, min_version=7)
    assert "answered on version 3 (behind)" in message


def test_an_answer_for_another_run_is_not_handed_out(site: Site, clock: LeapingClock) -> None:
    async def moved_on(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []}, headers={"X-Stitch-Run": "other"})

    site.replica("a").always = moved_on
    assert "answered for run 'other', not 'run'" in end_of_a_vain_request(site, clock)


def test_an_answer_that_does_not_say_its_version_meets_no_demand(
    site: Site, clock: LeapingClock
) -> None:
    async def unstamped(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []})

    site.replica("a").always = unstamped
    message = end_of_a_vain_request(site, clock, min_version=1)
    assert "without saying on which version" in message
    assert site.client().completions(prompt="x").version_start is None


def test_no_replica_names_what_each_one_said(site: Site, clock: LeapingClock) -> None:
    fake = site.replica("a", applied=5, ready=False, reason="no route to version 7")
    fake.always = fake.not_on_version
    site.dead_replica("b", applied=6)
    message = end_of_a_vain_request(site, clock, min_version=7)
    wanted = "no replica on version 7 or newer of run 'run'"
    assert f"{wanted} answered /v1/completions within 1000 s" in message
    # The last attempt may still be under way at the deadline; what it said before is told then too.
    said = r"a \(SERVING, version 5, no route to version 7\): [^;]*409 WeightVersionNotReady"
    assert re.search(said, message), message
    assert "b (SERVING, version 6): cannot connect" in message


def test_an_exact_version_that_all_have_passed_fails_before_the_deadline(site: Site) -> None:
    fake = site.replica("a", applied=9)
    fake.always = fake.not_on_version
    with pytest.raises(NoReplicaError, match="all have passed it"):
        site.client().completions(prompt="x", exact_version=7, deadline_s=1000)


def test_an_empty_board_is_said_to_be_empty(site: Site) -> None:
    with pytest.raises(NoReplicaError, match="the board lists no replica"):
        site.client(deadline_s=0.2).completions(prompt="x")


def test_a_board_that_cannot_be_read_is_named_and_known_replicas_stay(site: Site) -> None:
    site.replica("a")
    client = site.client(stale_after_s=0.2)
    assert client.completions(prompt="x").replica == "a"
    site.run.broken = True
    reads = site.run.num_reads
    wait_until(lambda: site.run.num_reads > reads + 6, "the board was read in vain")
    assert client.completions(prompt="x").replica == "a"
    assert client.replicas()[0].alive
    site.run.clear()
    site.run.broken = False
    wait_until(lambda: not client.replicas(), "the replica left")
    site.run.broken = True
    reads = site.run.num_reads
    wait_until(lambda: site.run.num_reads > reads + 1, "the board was read in vain again")
    with pytest.raises(NoReplicaError, match="the store does not answer"):
        client.completions(prompt="x", deadline_s=0.3)


def test_a_replica_that_appears_later_answers_a_waiting_request(site: Site) -> None:
    client = site.client()
    future = client.submit("/v1/completions", {"prompt": "x"})
    client.replicas()
    site.replica("late")
    assert future.result(timeout=20).replica == "late"


def test_without_a_run_the_client_follows_the_boards_current_run(site: Site) -> None:
    site.board.epochs.clear()
    client = site.client(run=None)
    client.replicas()  # returns when the board has been read once
    with pytest.raises(NoReplicaError, match="no current run"):
        client.completions(prompt="x", deadline_s=0.2)
    site.replica("a")
    site.board.epochs.append("run")
    assert client.completions(prompt="x").run == "run"
    site.board.runs["next"] = type(site.run)(name="next")
    site.board.runs["next"].beats["a"] = replace(site.run.beats["a"], run="next", applied=0)
    site.board.epochs.append("next")
    wait_until(lambda: client.replicas()[0].run == "next", "the client moved on")
    assert client.completions(prompt="x").run == "next"


def test_requests_are_spread_by_what_is_outstanding(site: Site) -> None:
    fakes = [site.replica(name) for name in "abc"]
    for fake in fakes:
        fake.always = fake.hang
    client = site.client()
    client.replicas()
    client._core.fleet._dice = random.Random(1)
    futures = [client.submit("/v1/completions", {"prompt": "x"}) for _ in range(30)]
    wait_until(lambda: sum(len(f.requests) for f in fakes) == 30, "all were sent")
    # The less loaded of two, each time; with other dice one may get only 6.
    assert min(len(fake.requests) for fake in fakes) >= 8
    assert sum(info.outstanding for info in client.replicas()) == 30
    for future in futures:
        future.cancel()
    wait_until(lambda: sum(f.aborted for f in fakes) == 30, "all were aborted")
    wait_until(
        lambda: sum(info.outstanding for info in client.replicas()) == 0, "none is outstanding"
    )


def test_requests_that_choose_at_the_same_time_see_each_other(site: Site) -> None:
    fakes = [site.replica(name) for name in "ab"]
    for fake in fakes:
        fake.always = fake.hang
    client = site.client()
    client.replicas()
    futures = [client.submit("/v1/completions", {"prompt": "x"}) for _ in range(40)]
    wait_until(lambda: sum(len(f.requests) for f in fakes) == 40, "all were sent")
    assert [len(fake.requests) for fake in fakes] == [20, 20]
    for future in futures:
        future.cancel()


def test_no_more_requests_are_in_flight_than_allowed(site: Site) -> None:
    fake = site.replica("a")
    fake.always = fake.hang
    client = site.client(max_in_flight=3)
    futures = [client.submit("/v1/completions", {"prompt": "x"}) for _ in range(6)]
    wait_until(lambda: len(fake.requests) == 3, "three were sent")
    fake.always = None
    for future in futures[:3]:
        future.cancel()
    assert [f.result(timeout=20).texts for f in futures[3:]] == [["from a"]] * 3


def test_cancelling_a_future_closes_its_connection(site: Site) -> None:
    fake = site.replica("a")
    fake.always = fake.hang
    future = site.client().submit("/v1/completions", {"prompt": "x"})
    wait_until(lambda: fake.requests, "the request arrived")
    assert future.cancel()
    wait_until(lambda: fake.aborted == 1, "the generation was aborted")


def test_map_keeps_the_order_and_raises_the_first_error(site: Site) -> None:
    hangs = asyncio.Event()

    async def echo(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["prompt"] == "bad":
            await hangs.wait()
            return await status(400, "bad prompt")(request)
        if body["prompt"] == "hang":
            hangs.set()
            await asyncio.Event().wait()
        return web.json_response({"choices": [{"text": body["prompt"]}]})

    fake = site.replica("a")
    fake.always = echo
    client = site.client()
    prompts = [str(i) for i in range(40)]
    answers = client.map({"prompt": prompt} for prompt in prompts)
    assert [answer.texts[0] for answer in answers] == prompts
    with pytest.raises(RequestFailedError, match="bad prompt"):
        client.map([{"prompt": "hang"}, {"prompt": "bad"}])
    wait_until(lambda: fake.aborted == 1, "the rest was cancelled")


async def test_asynchronous_twins_answer_on_the_callers_loop(site: Site) -> None:
    site.replica("a")
    client = site.client()
    answer = await client.acomplete(prompt="x", min_version=5)
    other = await client.achat(messages=[])
    assert (answer.replica, other.replica) == ("a", "a")


async def test_cancelling_an_asynchronous_call_closes_its_connection(site: Site) -> None:
    fake = site.replica("a")
    fake.always = fake.hang
    task = asyncio.create_task(site.client().acomplete(prompt="x"))
    await asyncio.to_thread(wait_until, lambda: fake.requests, "the request arrived")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: fake.aborted, "the generation was aborted")


def test_many_threads_can_share_a_client(site: Site) -> None:
    site.replica("a"), site.replica("b")
    client = site.client()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: client.completions(prompt=str(i)), range(64)))
    assert {answer.replica for answer in answers} == {"a", "b"}


def test_replicas_shows_what_the_heartbeats_say(site: Site) -> None:
    site.replica("b", applied=4, ready=False, reason="catching up")
    site.replica("a")
    first, second = site.client().replicas()
    assert (first.id, first.applied, first.ready, first.alive) == ("a", 5, True, True)
    assert (second.id, second.applied, second.reason) == ("b", 4, "catching up")
    assert first.url.startswith("http://127.0.0.1:")


def test_a_closed_client_says_so(site: Site) -> None:
    site.replica("a")
    client = site.client()
    client.close()
    client.close()
    for call in (lambda: client.completions(prompt="x"), client.replicas):
        with pytest.raises(UsageError, match="the client is closed"):
            call()


def test_closing_ends_calls_under_way(site: Site) -> None:
    fake = site.replica("a")
    fake.always = fake.hang
    client = site.client()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.completions(prompt="x"))
        wait_until(lambda: fake.requests, "the request arrived")
        client.close()
        with pytest.raises(UsageError, match="closed during the call"):
            waiting.result(timeout=20)


def test_the_context_manager_closes_and_leaves_no_thread(site: Site) -> None:
    site.replica("a")
    with site.client() as client:
        client.completions(prompt="x")
    assert "stitch-client" not in {thread.name for thread in threading.enumerate()}


def test_a_waiting_call_inside_a_futures_callback_is_refused_instead_of_hanging(
    site: Site,
) -> None:
    fake = site.replica("a")
    release = threading.Event()
    fake.script.append(fake.answer_after(release))
    client = site.client()
    caught: concurrent.futures.Future[str] = concurrent.futures.Future()

    def call_back(_: object) -> None:
        try:
            caught.set_result(f"answered {client.completions(prompt='y').texts}")
        except UsageError as error:
            caught.set_result(str(error))

    client.submit("/v1/completions", {"prompt": "x"}).add_done_callback(call_back)
    release.set()
    assert "own thread" in caught.result(timeout=20)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"min_version": 1, "exact_version": 1}, ConstraintError),
        ({"min_version": -1}, UsageError),
        ({"min_version": "7"}, UsageError),
        ({"min_version": 1, "weight_version": {"min_version": 1}}, ConstraintError),
        ({"weight_version": {"min_version": "7"}}, ConstraintError),
        ({"deadline_s": 0}, UsageError),
    ],
)
def test_malformed_calls_are_refused_before_anything_is_sent(
    site: Site, fields: dict[str, object], error: type[Exception]
) -> None:
    fake = site.replica("a")
    with pytest.raises(error):
        site.client().completions(prompt="x", **fields)
    assert fake.requests == []


def test_a_constraint_in_the_body_is_passed_on_as_it_is(site: Site) -> None:
    fake = site.replica("a", applied=7)
    site.client().completions(prompt="x", weight_version={"min_version": 7})
    assert fake.requests[0].body["weight_version"] == {"min_version": 7}
    assert "X-Stitch-Min-Version" not in fake.requests[0].headers


def test_unknown_settings_are_refused_with_the_near_name(site: Site) -> None:
    with pytest.raises(UsageError, match="did you mean 'deadline_s'"):
        site.client(deadlines_s=3)


def test_settings_come_from_the_environment_too(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STITCH_CLIENT_MAX_IN_FLIGHT", "3")
    monkeypatch.setenv("STITCH_CLIENT_DEADLINE_S", "7")
    client = site.client(deadline_s=9.0)
    assert (client.settings.max_in_flight, client.settings.deadline_s) == (3, 9.0)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('{"error": {"message": "too long", "type": "BadRequest"}}', "400 BadRequest too long"),
        ('{"error": "too long"}', "400 too long"),
        ('{"object": "error", "message": "too long"}', "400 too long"),
        ('["too long"]', "400 ['too long']"),
        ("too long", "400 too long"),
        ("", "400"),
    ],
)
def test_the_engines_own_words_are_passed_on(site: Site, body: str, shown: str) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=400)

    site.replica("a").always = refuse
    with pytest.raises(RequestFailedError) as caught:
        site.client().completions(prompt="x")
    assert str(caught.value).endswith(f"answered /v1/completions with {shown}")
    assert caught.value.body == body


@pytest.mark.parametrize("applied", ["null", '"7"', "true"])
def test_an_odd_409_is_retried_like_any_other(site: Site, applied: str) -> None:
    async def odd(request: web.Request) -> web.StreamResponse:
        text = f'{{"error": {{"applied": {applied}}}}}'
        return web.Response(text=text, status=409, headers={"Retry-After": "soon"})

    site.replica("a").script.append(odd)
    assert site.client().completions(prompt="x", min_version=5).attempts == 2


def test_an_address_that_is_no_url_is_skipped(site: Site) -> None:
    site.replica("good")
    site.run.put("bad", replace(site.run.beats["good"], replica="bad", url="http://"))
    answers = site.client().map([{"prompt": "x"}] * 10)
    assert {answer.replica for answer in answers} == {"good"}


def test_a_client_from_before_a_fork_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.replica("a")
    client = site.client()
    monkeypatch.setattr("stitch.client.loop.os.getpid", lambda: -1)
    with pytest.raises(UsageError, match="made in another process"):
        client.completions(prompt="x")
    client.close()
    monkeypatch.undo()


@pytest.mark.parametrize(("path", "body"), [("v1/x", {}), ("/v1/x", "text")])
def test_what_is_no_request_is_refused(site: Site, path: str, body: object) -> None:
    with pytest.raises(UsageError):
        site.client().ask(path, body)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("1e9", 60.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)
def test_retry_after_is_read_leniently_and_capped(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text) == seconds


@pytest.mark.parametrize(
    "address",
    ["//x", "http://" + "a" * 300, "http://user:secret@127.0.0.1:1", "http://\ud800", "ws://x"],
    ids=ascii,
)
def test_an_odd_address_on_the_board_never_fails_a_request(site: Site, address: str) -> None:
    site.replica("good")
    site.run.put("bad", replace(site.run.beats["good"], replica="bad", url=address))
    answers = site.client(token="secret").map([{"prompt": "x"}] * 10)
    assert {answer.replica for answer in answers} == {"good"}


@pytest.mark.parametrize("code", [200, 409, 500])
@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"error":' * 50_000, b"9" * 5000])
def test_an_answer_that_cannot_be_read_is_a_named_error(site: Site, code: int, body: bytes) -> None:
    async def odd(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=code, content_type="application/json")

    site.replica("a").always = odd
    with pytest.raises((RequestFailedError, NoReplicaError)):
        site.client(deadline_s=0.3).completions(prompt="x")


@pytest.mark.parametrize("version", [-5, True, 10**8, 10**4000, "7", None])
def test_a_stamp_that_is_no_version_is_not_taken_for_one(site: Site, version: object) -> None:
    async def odd(request: web.Request) -> web.StreamResponse:
        body = {"choices": [1, {"text": "x"}], "weight_version_start": version}
        return web.json_response(body, headers={"X-Stitch-Version-Start": "9" * 4500})

    site.replica("a").always = odd
    answer = site.client().completions(prompt="x")
    assert answer.version_start is None
    assert answer.texts == ["x"]
