"""The embedded engine: an inference server of our own around Hugging Face transformers.

One process: an aiohttp server on loopback and one decode thread. Requests join and leave between
decoding steps, and so do weights. Importing this package imports no torch; its modules do.
"""
