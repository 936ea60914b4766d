"""Blobs on their way: checked, staged on disk, and shared by the processes of one host."""
