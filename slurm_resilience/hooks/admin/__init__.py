"""The admin's side: configuration, installation, inspection, suspects.  Never on the hot path."""
