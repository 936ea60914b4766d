"""`python -m stitch.engines.sglang MODEL [SGLang's arguments]`: SGLang's server with our plugin.

Becomes `python -m sglang.launch_server` once the plugin is known to be in it. The control token
comes in STITCH_ENGINE_TOKEN, never on the command line.
"""

from __future__ import annotations

import os
import runpy
import sys

from stitch.engines.plugin_launch import has_token
from stitch.engines.sglang import PLUGIN

_PLUGINS_ENV = "SGLANG_PLUGINS"
_SERVER = "sglang.launch_server"


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if not has_token():
        return 2
    allowed = os.environ.get(_PLUGINS_ENV)
    if allowed:  # unset, it allows every plugin
        os.environ[_PLUGINS_ENV] = with_ours(allowed)
    from sglang.srt.plugins import load_plugins

    from stitch.engines.sglang.plugin import is_in_front

    load_plugins()  # does not raise: whatever failed is in the log
    if not is_in_front():
        print(
            "stitch engine: fatal: SGLang did not take the plugin; see what it logged above, and "
            "which versions of SGLang are supported",
            file=sys.stderr,
        )
        return 70
    sys.argv = [_SERVER, "--model-path", *argv]
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)
    return 0


def with_ours(allowed: str) -> str:
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
