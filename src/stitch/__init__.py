"""Stitch: lossless weight patches from an RL trainer to a fleet of rollout engines.

The public names below are imported when they are first used, so that `import stitch` costs
nothing and has no side effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stitch import errors as errors
    from stitch.board import open_board as open_board
    from stitch.client import Client as Client
    from stitch.publish import Publisher as Publisher
    from stitch.types import VersionConstraint as VersionConstraint
    from stitch.types import VersionRef as VersionRef

    __version__: str

_HOMES = {
    "Client": "stitch.client",
    "Publisher": "stitch.publish",
    "VersionConstraint": "stitch.types",
    "VersionRef": "stitch.types",
    "open_board": "stitch.board",
}

__all__ = [  # noqa: RUF022 - the order in which a reader meets them
    "open_board",
    "Publisher",
    "Client",
    "VersionRef",
    "VersionConstraint",
    "errors",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time it is asked for."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("stitch-rl")
    elif name == "errors":
        value = import_module("stitch.errors")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'stitch' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
