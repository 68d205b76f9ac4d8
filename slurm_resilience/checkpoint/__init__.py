"""Checkpoints that cannot lie: commit, index, fencing, verification and retention.

Only ``checkpoint.dcp`` imports torch; everything else, this package included, starts without it.
"""
