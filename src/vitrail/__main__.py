"""`python -m vitrail` is the command `vitrail`."""

import os
import sys

from vitrail.cli import main

if __name__ == "__main__":
    status = main()
    if "WORLD_SIZE" in os.environ:  # torchrun's; torch is not imported for help's sake
        from vitrail.distributed import exit_process

        exit_process(status)
    sys.exit(status)
