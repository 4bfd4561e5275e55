"""`python -m forebay_gateway.bench serve …`."""

import sys

from forebay_gateway.bench.main import main

sys.exit(main(sys.argv[1:]))
