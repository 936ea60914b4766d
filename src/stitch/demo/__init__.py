"""`stitch demo`: a small RL run whose rollouts come from replicas that patches keep current.

Nothing is imported here: the supervisor runs without torch, only the trainer and the engines
load it.
"""
