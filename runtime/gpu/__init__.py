"""GPU basics without any ops: kernels compiled at run time, launches, copies, cuBLASLt."""
