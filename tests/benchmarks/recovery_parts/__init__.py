"""What recovery.py is made of: the small training of each system, and how each system is started and hurt."""
