"""What knows graphs and no recommenders: capture, rules, pipeline, verifier, report, dump, diff."""
