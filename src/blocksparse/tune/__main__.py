"""`python -m blocksparse.tune MODEL`."""

import sys

from blocksparse.tune.command import main

sys.exit(main())
