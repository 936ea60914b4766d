"""A host copy of a view that is moved from version to version and always proven."""

from stitch.mirror.advance import AdvanceError
from stitch.mirror.ancestry import from_anchor_on_line, lead, line_of, recognise, root_base
from stitch.mirror.mirror import Mirror

__all__ = [
    "AdvanceError",
    "Mirror",
    "from_anchor_on_line",
    "lead",
    "line_of",
    "recognise",
    "root_base",
]
