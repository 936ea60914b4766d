"""Engines that run as a group of ranks: one front that speaks the port, workers that hold weights.

The front (`GroupEngine`) runs where requests are answered; each rank holds its share of the weights
(`stitch.engines.ranks`). What joins them is the small port `Workers`, which each engine's plugin
implements with its own remote calls.
"""
