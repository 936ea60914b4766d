"""A host copy of a view that is moved from version to version and always proven."""

from stitch.mirror.advance import AdvanceError
from stitch.mirror.mirror import Mirror

__all__ = ["AdvanceError", "Mirror"]
