"""What will this cluster do to a job?  :mod:`site` reads it, :mod:`forecast` says what happens, the rest what is wrong."""
