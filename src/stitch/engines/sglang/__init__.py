"""SGLang 0.5.23 as an engine: a plugin that SGLang finds by its entry point.

    STITCH_ENGINE_TOKEN=... python -m stitch.engines.sglang MODEL --port 8200 [SGLang's arguments]

starts an unmodified SGLang with it; `stitch serve --engine sglang` does so by itself. `plugin`
runs in every process of SGLang. In each scheduler, `scheduler` holds one rank's weights and
`rank_server` answers for them on a private socket; in the server process, `front` offers the
control interface and `workers` asks the ranks. Importing this package imports none of them.
"""

PLUGIN = "stitch"
"""Name of the entry point, as it stands in SGLANG_PLUGINS."""
SOCKETS_ENV = "STITCH_SGLANG_SOCKETS"
"""A private directory with one socket a rank; the plugin makes it, its processes inherit it."""
