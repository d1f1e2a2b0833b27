"""Turns forward into a graph: traced on two batches, with guards for Python's decisions.

entry                 ladder (the whole model, else its parts), trace (one trace), modes (train
                      and eval), symbolic (without an example)
examples              batches
tracing               tracer, values, intercept, recording, operands, scratch, layers, calls,
                      frames
result                tidy, constants, proof (the graph gives the model's own results)
checked at each call  guards, by_value, reading, running, absent
side effects          handed (on arguments), left_behind (on the model), unwritten (undone)
not traceable         refused (why), outside (kept as one call), sizes (tried again)
the model's class     looks
"""
