"""vLLM 0.32 and 0.33 as an engine: a plugin that vLLM finds by its entry points.

    STITCH_ENGINE_TOKEN=... python -m stitch.engines.vllm MODEL --port 8100 [vLLM's own arguments]

starts an unmodified vLLM with it; `stitch serve --engine vllm` does so by itself. The plugin has
three parts: `plugin` runs in every process of vLLM, `worker` holds one rank's weights, `endpoint`
offers the control interface on vLLM's API server. Importing this package imports none of them.
"""

PLUGIN = "stitch"
"""Name of the entry points, as it stands in VLLM_PLUGINS."""
WORKER_EXTENSION = "stitch.engines.vllm.worker.StitchWorkerExtension"
