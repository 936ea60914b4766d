"""Stands in for the CPU build of sgl-kernel, which PyPI does not have.

SGLang imports names from it and, with `--attention-backend torch_native` on a processor without
AMX, calls none of them. One that is called all the same says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called: this is a stand-in without it")

    return missing
