"""The command line of an SGLang with our plugin."""

from __future__ import annotations

import functools

from stitch.engines.plugin_launch import plugin_command

sglang_command = functools.partial(plugin_command, "stitch.engines.sglang")
