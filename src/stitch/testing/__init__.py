"""Fakes, fault injection and contract suites that users of the ports can run."""
