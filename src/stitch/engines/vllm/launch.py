"""The command line of a vLLM with our plugin."""

from __future__ import annotations

import functools

from stitch.engines.plugin_launch import plugin_command

vllm_command = functools.partial(plugin_command, "stitch.engines.vllm")
