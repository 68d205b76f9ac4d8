"""What runs as root around every job: prolog, epilog, node checks, drain and return.  An error of ours never drains a node.

Every module here but those in ``admin/`` runs on the node's own Python, 3.6 or newer, with the standard library alone:
``hooks install`` copies them to a root-owned folder under the name ``slurm_resilience_node``, so imports are relative,
annotations are quoted, and nothing is imported that costs a job milliseconds (re and typing come with json at most).
"""
