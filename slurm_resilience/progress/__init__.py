"""How a rank and its agent talk: a shared-memory page for progress and orders, a datagram socket for facts.

This is where ``runtime`` (no torch) and ``training`` (torch) meet; neither imports the other.
"""
