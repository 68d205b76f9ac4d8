"""The only place that speaks to Slurm: its commands, its words, its environment variables.

No torch, nothing but the standard library at import; ClusterShell is loaded when a node list is first opened.
"""
