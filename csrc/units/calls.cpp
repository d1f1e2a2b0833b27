// Host calls, compiled at once: pybind11 takes longer than they do (CMakeLists.txt).

#include "../addresses.cpp"
#include "../bag_gradients.cpp"
#include "../cublaslt.cpp"
#include "../layers.cpp"
#include "../module.cpp"
#include "../same.cpp"
