"""The SGLang plugin's front without an SGLang: set-up, closed routes, stamps on answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch.engines.plugin_launch import plugin_environment
from stitch.engines.sglang import SOCKETS_ENV, front
from stitch.engines.sglang.__main__ import with_ours
from stitch.engines.sglang.front import REFUSED, Front, check_setup, control_routes
from stitch.engines.sglang.launch import sglang_command
from stitch.engines.sglang.stamping import noting, stamping
from stitch.engines.wire import PREFIX, TOKEN_ENV, VIEW_ENV
from stitch.errors import EngineError, UsageError

TOKEN = "a control token for tests"


def test_the_command_line_passes_the_engines_own_arguments_on() -> None:
    command = sglang_command("m", port=7, python="/e/python", args=["--device", "cpu"])
    assert command[:4] == ["/e/python", "-m", "stitch.engines.sglang", "m"]
    assert command[-4:] == ["--dtype", "bfloat16", "--device", "cpu"]
    with pytest.raises(UsageError, match="--host is the replica's"):
        sglang_command("m", port=7, args=["--host", "0.0.0.0"])
    assert plugin_environment("checkpoint") == {VIEW_ENV: "checkpoint"}


def test_our_plugin_is_allowed_along_with_others() -> None:
    assert with_ours("a, b") == "a,b,stitch"
    assert with_ours("stitch,a") == "stitch,a"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["model"]])
def test_the_launcher_wants_a_model_and_a_token(arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
    command = [sys.executable, "-m", "stitch.engines.sglang", *arguments]
    found = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert found.returncode == 2
    assert (TOKEN_ENV if arguments == ["model"] else "MODEL").encode() in found.stderr


def test_loading_the_plugin_needs_neither_sglang_nor_torch() -> None:
    code = (
        "import sys, stitch.engines.sglang.front, stitch.engines.sglang.plugin as plugin; "
        "plugin.register(); assert not plugin.is_in_front(); "
        "assert not {'sglang', 'torch', 'aiohttp', 'numba'} & set(sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def options(**given: Any) -> Any:
    usual = {name: wanted for name, (wanted, _) in REFUSED.items()}
    return (usual | given).__getitem__


def test_options_under_which_weights_cannot_be_followed_are_refused() -> None:
    check_setup(options())
    check_setup(options(cpu_offload_gb=None, enable_lora=None))
    for name, value in {
        "dp_size": 2,
        "pp_size": 2,
        "tokenizer_worker_num": 4,
        "disaggregation_mode": "prefill",
        "enable_lora": True,
        "cpu_offload_gb": 3,
        "weight_cache_mode": "daemon",
        "enable_hierarchical_cache": True,
    }.items():
        with pytest.raises(UsageError, match=r"LoRA|--" + name.replace("_", "-")):
            check_setup(options(**{name: value}))


def route(path: str, level: str | None = None) -> Any:
    endpoint = SimpleNamespace() if level is None else SimpleNamespace(_auth_level=level)
    return SimpleNamespace(path=path, endpoint=endpoint)


def test_control_routes_are_closed_those_of_included_routers_too() -> None:
    included = SimpleNamespace(
        original_router=SimpleNamespace(routes=[route("/scale", "admin_force"), route("/loads")]),
        include_context=SimpleNamespace(prefix="/more"),
    )
    routes = [
        route("/generate"),
        route("/health", "normal"),
        route("/drain", "admin_optional"),
        route("/freeze_gc", "admin_optional"),
        SimpleNamespace(path="/static"),
        included,
    ]
    closed = control_routes(routes)
    assert closed - front.CLOSED == {"/drain", "/more/scale"}
    assert closed >= {"/pause_generation", "/update_weights_from_tensor", "/open_session"}


async def ask(
    application: Any, path: str, *, method: str = "POST", headers: Any = (), root: str = ""
) -> tuple[int, dict[str, str], bytes]:
    scope = {
        "type": "http",
        "method": method,
        "path": root + path,
        "root_path": root,
        "headers": list(headers),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    await application(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    fields = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], fields, body


def application(*messages: Any) -> Any:
    """Answers everything with these, the first of which is (status, headers)."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        status, headers = messages[0]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in messages[1:-1]:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": messages[-1]})

    return answer


@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
async def test_control_is_answered_first_and_control_routes_are_closed(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orjson", json)
    whole = Front(TOKEN, frozenset({"/pause_generation"})).before(
        application((200, [(b"content-type", b"text/plain")]), b"SGLang's")
    )
    assert (await ask(whole, "/health", root=root))[2] == b"SGLang's"
    assert (await ask(whole, "/pause_generation", root=root))[0] == 403
    assert (await ask(whole, f"{PREFIX}/describe", root=root))[0] == 401
    own = [(b"authorization", f"Bearer {TOKEN}".encode())]
    assert (await ask(whole, f"{PREFIX}/describe", headers=own, root=root))[0] == 503
    for short in ("", "too short"):
        with pytest.raises(UsageError):
            Front(short, frozenset())


async def test_learning_comes_before_sglangs_own_start_and_its_failure_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "orjson", json)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setenv(SOCKETS_ENV, str(sockets))
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, int]]:
        log.append("SGLang started")
        yield {"state": 1}

    app = SimpleNamespace(
        build_middleware_stack=lambda: application((200, []), b""),
        router=SimpleNamespace(lifespan_context=lifespan),
    )
    manager = SimpleNamespace(generate_request=generating({}))
    it = Front(TOKEN, frozenset({"/flush_cache"}))

    async def learn(manager: Any) -> None:
        log.append("learned")
        if log.count("learned") > 1:
            raise EngineError("rank 1: what it holds is another checkpoint")

    monkeypatch.setattr(it, "_learn", learn)
    monkeypatch.setattr(front, "end_engine", lambda reason: log.append(reason))
    it.stand_before(app, manager)
    async with app.router.lifespan_context(app) as state:
        assert state == {"state": 1}
    assert log == ["learned", "SGLang started"]
    assert (await ask(app.build_middleware_stack(), "/flush_cache"))[0] == 403
    async with app.router.lifespan_context(app):
        assert "another checkpoint" in log[3]
    assert not os.access(sockets, os.F_OK)


# --- stamps --------------------------------------------------------------------------------------


def meta(*spans: tuple[str, int, int]) -> dict[str, Any]:
    said = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return {"meta_info": {"weight_version": "9", **({"weight_versions": said} if said else {})}}


def generating(*answers: Any) -> Any:
    async def generate_request(obj: Any, request: Any = None) -> AsyncIterator[Any]:
        for answer in answers:
            yield answer

    return generate_request


async def stamped(path: str, answers: list[Any], *messages: Any) -> tuple[dict[str, str], bytes]:
    """What comes out where SGLang makes `answers` and sends `messages`."""

    def dumps(value: Any) -> bytes:
        return json.dumps(value).encode()

    inner = application(*messages)
    generate = noting(generating(*answers))

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        send = stamping(scope, send, json.loads, dumps)
        async for _ in generate(None, SimpleNamespace(scope=scope)):
            pass
        await inner(scope, receive, send)

    _, headers, body = await ask(whole, path)
    assert headers.get("content-length", str(len(body))) == str(len(body))
    return headers, body


JSON = (200, [(b"content-type", b"application/json"), (b"content-length", b"999")])
EVENTS = (200, [(b"content-type", b"text/event-stream; charset=utf-8")])


async def test_each_choice_says_which_version_each_token_came_from() -> None:
    answers = [[meta(("7", 0, 2), ("8", 2, 3)), meta(("8", 0, 3))]]
    body = {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}], "usage": {}}
    whole = json.dumps(body).encode()
    headers, found = await stamped("/v1/completions", answers, JSON, whole[:9], whole[9:])
    assert json.loads(found) == {
        "choices": [
            {
                "index": 0,
                "text": "a",
                "weight_versions": [
                    {"version": 7, "start": 0, "end": 2},
                    {"version": 8, "start": 2, "end": 3},
                ],
            },
            {"index": 1, "text": "b", "weight_versions": [{"version": 8, "start": 0, "end": 3}]},
        ],
        "usage": {},
        "weight_version_start": 7,
        "weight_version_end": 8,
    }
    assert (headers["x-stitch-version-start"], headers["x-stitch-version-end"]) == ("7", "8")


async def test_generate_has_the_stamp_beside_its_own_and_a_batch_has_headers() -> None:
    one = meta(("3", 0, 4))
    headers, found = await stamped("/generate", [one], JSON, json.dumps(one).encode())
    assert json.loads(found) == {**one, "weight_version_start": 3, "weight_version_end": 3}
    batch = [meta(("3", 0, 4)), meta(("4", 0, 4))]
    sent = json.dumps(batch).encode()
    headers, found = await stamped("/generate", [batch], JSON, sent)
    assert found == sent
    assert (headers["x-stitch-version-start"], headers["x-stitch-version-end"]) == ("3", "4")


@pytest.mark.parametrize(
    "messages",
    [
        (b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"),
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n',),
    ],
)
async def test_a_stream_has_one_more_event_before_its_end(messages: tuple[bytes, ...]) -> None:
    answers = [{"index": 1, **meta()}, {"index": 0, **meta(("1", 0, 2))}]
    answers.append({"index": 1, **meta(("1", 0, 1), ("2", 1, 2))})
    headers, found = await stamped("/v1/completions", answers, EVENTS, *messages)
    first, event, end, rest = found.split(b"\n\n")
    assert (first, end, rest) == (b'data: {"choices": []}', b"data: [DONE]", b"")
    assert json.loads(event.removeprefix(b"data: ")) == {
        "object": "stitch.versions",
        "choices": [],
        "weight_version_start": 1,
        "weight_version_end": 2,
        "weight_versions": [
            [{"version": 1, "start": 0, "end": 2}],
            [{"version": 1, "start": 0, "end": 1}, {"version": 2, "start": 1, "end": 2}],
        ],
    }
    assert "x-stitch-version-start" not in headers


async def test_labels_that_are_not_ours_stand_for_unknown_weights() -> None:
    one = meta(("default", 0, 2), ("0", 2, 3))
    body = json.dumps({"choices": [{"index": 0}]}).encode()
    headers, found = await stamped("/v1/completions", [one], JSON, body)
    answer = json.loads(found)
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (None, 0)
    assert answer["choices"][0]["weight_versions"] == [{"version": 0, "start": 2, "end": 3}]
    assert "x-stitch-version-start" not in headers


@pytest.mark.parametrize(
    ("answers", "start", "body"),
    [
        ([meta()], JSON, b'{"choices": [{"index": 0}]}'),  # its versions are not known
        ([], JSON, b'{"choices": []}'),  # nothing was generated
        ([{"index": 1, **meta(("1", 0, 2))}], JSON, b'{"choices": [{"index": 1}]}'),
        ([meta(("1", 0, 2))], JSON, b'{"choices": []}'),  # not what was generated
        ([meta(("1", 0, 2))], (400, JSON[1]), b'{"error": 1}'),
        ([meta(("1", 0, 2))], (200, [*JSON[1], (b"content-encoding", b"br")]), b"\x00"),
        ([meta()], EVENTS, b"data: [DONE]\n\n"),
        ([meta(("1", 0, 2))], EVENTS, b'data: {"text": "data: [DONE]"}\n\n'),
    ],
)
async def test_answers_that_cannot_be_stamped_stay_as_they_are(
    answers: list[Any], start: Any, body: bytes
) -> None:
    if start[1][1:]:
        start = (start[0], [h for h in start[1] if h[0] != b"content-length"])
    headers, found = await stamped("/v1/completions", answers, start, body)
    assert found == body
    assert "x-stitch-version-start" not in headers


async def test_a_generator_that_is_left_is_closed_at_once() -> None:
    closed: list[bool] = []

    async def generate_request(obj: Any, request: Any = None) -> AsyncIterator[Any]:
        try:
            yield meta(("1", 0, 1))
            yield meta(("1", 0, 2))
        finally:
            closed.append(True)

    answers: Any = noting(generate_request)(None)
    assert await anext(answers) == meta(("1", 0, 1))
    await answers.aclose()
    assert closed == [True]
