"""Turns forward into a graph: traced on two batches, with guards for Python's decisions.

entry                 capture_model (the whole model, else its parts), trace (one trace), modes
                      (train and eval), symbolic (without an example)
examples              batches, plain_model (what runs them), unread_entries (what of them is not
                      read)
tracing               tracer, values, shapes, intercept, recording, operands, scratch, layers,
                      calls, frames, no_grad, storages, counted_sizes
result                tidy, constants, proof (the graph gives the model's own results)
checked at each call  guards, layer_shapes, dynamic_sizes, squeezes, step_loops, python_reads,
                      profilers, code_watcher, missing_attributes
side effects          shown, muted (what forward prints and logs), argument_writes,
                      attribute_writes (of the model), kept_numbers (counters), moving_state (of
                      helpers), restored_state (undone)
not traceable         refused (why), opaque_calls (kept as one call), replaced_builtins (tried
                      again with len, int and type of our own), numpy_calls (as torch's),
                      distributions (traced with shapes of our own)
the model's class     result_class
"""
