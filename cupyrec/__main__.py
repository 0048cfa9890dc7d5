"""``python -m cupyrec`` is the command ``cupyrec``."""

import sys

from cupyrec.cli import main

sys.exit(main())
