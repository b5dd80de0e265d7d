"""`python -m outrider`: the command line without its script."""

import sys

from outrider.cli import main

sys.exit(main())
