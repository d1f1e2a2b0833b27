// Host calls and Python objects, compiled at once: pybind11 takes longer than they do
// (CMakeLists.txt).

#include "../addresses.cpp"
#include "../bag_gradients.cpp"
#include "../cublaslt.cpp"
#include "../id_table_python.cpp"
#include "../layers.cpp"
#include "../module.cpp"
#include "../same.cpp"
#include "../tensor_attributes.cpp"
#include "../watched_dicts.cpp"
