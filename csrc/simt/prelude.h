// What every kernel includes first, compiled once for all builds of tests/simt_build.py: it is most
// of the time that one of them takes.
#include "intrinsics.cuh"
#include "pack.cuh"
