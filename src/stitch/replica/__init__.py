"""A replica: one sidecar with its engine. Settings are in `config`, the entry point in `run`."""
