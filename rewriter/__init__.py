"""The graph compiler: capture, rules, pipeline, verifier, report, dump, diff; no recommenders."""
