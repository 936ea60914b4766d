"""What is kept of a run: retention, collection of garbage, and checking what is there."""
