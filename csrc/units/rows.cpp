// Row gradients and initial rows, compiled at once: pybind11 takes longer than they do
// (CMakeLists.txt).

#include "../initial_rows.cpp"
#include "../row_lots.cpp"
#include "../row_update_python.cpp"
