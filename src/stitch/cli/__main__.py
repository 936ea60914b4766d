"""`python -m stitch.cli` is `stitch`."""

import sys

from stitch.cli.main import main

sys.exit(main())
