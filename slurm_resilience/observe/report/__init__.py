"""One page about one run, made of its records: :mod:`story` reads them, :mod:`figures` draws, :mod:`page` writes HTML."""
