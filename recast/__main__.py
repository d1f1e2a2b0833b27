"""``python -m recast``."""

from recast.rewriter.cli.main import main

raise SystemExit(main())
