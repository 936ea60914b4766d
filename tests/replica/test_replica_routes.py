"""Blocked, own and forwarded routes under every spelling."""

from __future__ import annotations

import pytest

from stitch.replica.routes import RouteKind, RouteTable

TABLE = RouteTable(("/health", "/metrics"), ("/custom_control", "/admin/*"))


@pytest.mark.parametrize(
    "target",
    [
        "/stitch/v1/commit", "/stitch", "/stitch/", "/STITCH/v1/describe", "//stitch/v1/commit",
        "/stitch//v1/commit", "/v1/../stitch/v1/commit", "/%73titch/v1/commit",
        "/%2573titch/v1/commit", "/stitch%2fv1/commit", "/./stitch/v1/commit", "/stitch\\v1/commit",
        "/x/%2e%2e/stitch/v1/commit", "/stitch;x=1/v1/commit", "/%00stitch/v1", "/stitch%20/v1",
        "http://other/stitch/v1/commit", "/update_weights", "/update_weights/", "/UPDATE_WEIGHTS",
        "/update_weights?x=1", "/update_weights%3Fx", "/update_weights_from_disk", "/pause",
        "/pause?mode=abort", "/pause;a", "/resume", "/v1/load_lora_adapter", "/flush_cache",
        "/collective_rpc", "/weights_checker", "/get_weights_by_name", "/pause_generation",
        "/abort_request", "/reset_prefix_cache", "/sleep", "/v1/update_weights",
        "/custom_control", "/custom_control/", "/admin/x", "/admin", "/a/../admin/x",
        "/init_weights_update_group", "/release_memory_occupation", "/weight_info",
        "//health", "/HEALTH", "/health/",
    ],
)  # fmt: skip
def test_control_routes_are_blocked_under_every_spelling(target: str) -> None:
    assert TABLE.route(target).kind is RouteKind.BLOCKED


@pytest.mark.parametrize(
    "target",
    [
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/generate", "/",
        "/v1/completions?weights=1", "/pauses", "/stitching", "/custom_controls", "/version",
        "*", "/v1/files/my%2Fname", "/model_info",
    ],
)  # fmt: skip
def test_everything_else_is_forwarded(target: str) -> None:
    assert TABLE.route(target).kind is RouteKind.FORWARD


def test_targets_are_forwarded_as_they_were_written() -> None:
    assert TABLE.route("/v1/files/a%2Fb?x=%20#f").target == "/v1/files/a%2Fb?x=%20"
    assert TABLE.route("http://h:1/v1/models?x").target == "/v1/models?x"


def test_own_routes_are_ours_with_or_without_a_query() -> None:
    assert TABLE.route("/health").kind is RouteKind.OWN
    assert TABLE.route("/health?probe=1").kind is RouteKind.OWN


@pytest.mark.parametrize(
    ("target", "generates"),
    [
        ("/v1/completions", True),
        ("/v1/chat/completions?x=1", True),
        ("/generate", True),
        ("/v1/responses", True),
        ("/v1/models", False),
        ("/tokenize", False),
    ],
)
def test_generating_routes_are_known(target: str, generates: bool) -> None:
    assert TABLE.route(target).generates is generates


@pytest.mark.parametrize(
    "target",
    [
        "/%3f/../stitch/v1/commit", "/a%3Fb/../../stitch/v1/commit", "/admin/../v1/models",
        "/admin/..;/v1/models", "/stitch/%2e%2e/v1/models", "/v1/models/%3f/..", "/v1/./models",
        "/stitch\\..\\v1\\models",
    ],
)  # fmt: skip
def test_a_path_with_dot_segments_has_two_readings_and_is_not_forwarded(target: str) -> None:
    assert TABLE.route(target).kind is RouteKind.BLOCKED


def test_dots_that_are_no_segments_are_forwarded() -> None:
    for target in (
        "/v1/models/a..b",
        "/v1/files/.hidden",
        "/v1/models?next=../x",
        "/v1/models/...",
    ):
        assert TABLE.route(target).kind is RouteKind.FORWARD
