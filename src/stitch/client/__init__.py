"""What trainers embed: requests to the replicas that a board lists, with version constraints."""

from __future__ import annotations

from stitch.client.answer import Answer
from stitch.client.client import Client, ReplicaInfo
from stitch.client.settings import ClientConfig
from stitch.client.stream import AsyncStream, Stream

__all__ = ["Answer", "AsyncStream", "Client", "ClientConfig", "ReplicaInfo", "Stream"]
