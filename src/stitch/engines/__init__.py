"""The engine port, its HTTP form, and one adapter per engine."""
