"""How often to save, and how much of the time will be training?  Closed forms, a simulation, and replayed failures.

Nothing here touches Slurm or a run; NumPy is loaded by the simulation alone.
"""
