"""``python -m recast``."""

from recast.rewriter.cli import main

raise SystemExit(main())
