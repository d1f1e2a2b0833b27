"""The GPU as such: kernels compiled at run time, launched, and cuBLASLt; no op of its own."""
