"""Frameworks that own the training loop and write checkpoints of their own kind; each module needs its framework installed.

:mod:`lightning`, :mod:`transformers`, :mod:`accelerate`; all stand on :mod:`file_run`, which any other framework may use.
"""
