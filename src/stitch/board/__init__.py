"""The board: an append-only log of immutable versions in an object store."""

from stitch.board.board import Board, open_board
from stitch.board.cache import BlobCache
from stitch.board.creation import Patience
from stitch.board.log import Run
from stitch.board.probe import probe_create_if_absent
from stitch.board.routes import AnchorStep, MergedStep, PatchStep, Route, Step, plan_route
from stitch.board.staging import Staging
from stitch.board.store import ObjectInfo, ObjectStore, PutMode

__all__ = [
    "AnchorStep",
    "BlobCache",
    "Board",
    "MergedStep",
    "ObjectInfo",
    "ObjectStore",
    "PatchStep",
    "Patience",
    "PutMode",
    "Route",
    "Run",
    "Staging",
    "Step",
    "open_board",
    "plan_route",
    "probe_create_if_absent",
]
