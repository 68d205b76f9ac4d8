"""What happened: the event file of a run, and the incidents computed from it."""
