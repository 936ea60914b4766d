"""Views: the weights as they are served, derived from a base checkpoint's tensors."""

from stitch.views.floats import VIEWS, ViewReader, view_schema

__all__ = ["VIEWS", "ViewReader", "view_schema"]
