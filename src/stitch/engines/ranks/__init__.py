"""The worker side of an engine: one rank's weights changed in place, and what the ranks agree on.

`port` and `agreement` need no torch: the front process uses them. `weights` is the rank's side.
"""
