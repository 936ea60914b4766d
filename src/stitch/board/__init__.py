"""The board: an append-only log of immutable versions in an object store."""

from stitch.board.board import Board, open_board
from stitch.board.log import Run
from stitch.board.routes import AnchorStep, MergedStep, PatchStep, Route, Step, plan_route
from stitch.board.stores.creation import Patience
from stitch.board.stores.probe import probe_create_if_absent
from stitch.board.stores.store import ObjectInfo, ObjectStore, PutMode
from stitch.board.transfers.cache import BlobCache
from stitch.board.transfers.staging import Staging

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
