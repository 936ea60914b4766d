"""The `stitch` program: one module per verb, imported only when it is chosen."""
