"""Stitch: lossless weight patches from an RL trainer to a fleet of rollout engines."""
