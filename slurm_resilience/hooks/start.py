"""Started by the shell entry as a file: makes the package beside it importable, and nothing else."""

import os
import sys


def _main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.dirname(here))
    package = __import__(os.path.basename(here) + ".main", fromlist=["main"])
    code = package.main(sys.argv[1:], dict(os.environ))
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
