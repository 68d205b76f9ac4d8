"""A user's own job, hurt on purpose: through a list of faults, with a verdict on one page."""
