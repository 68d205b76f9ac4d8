"""Checkpoints that cannot lie: commit, index, fencing, verification and retention.

Only the modules named ``dcp*`` import torch; everything else, this package included, starts without it.
"""
