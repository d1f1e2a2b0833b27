// Python objects, compiled at once: pybind11 takes longer than they do (CMakeLists.txt).

#include "../id_table_python.cpp"
#include "../tensor_attributes.cpp"
#include "../watched_dicts.cpp"
