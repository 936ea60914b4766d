"""Where every element of the checkpoint lives in an engine's own parameters. Imports torch."""
