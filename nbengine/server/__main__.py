"""The entry point of a server's process: `python -m nbengine.server`, with its order on standard input."""

from __future__ import annotations

import sys

from nbengine.server.process import main

if __name__ == "__main__":
    sys.exit(main())
