// Sequences, compiled at once: pybind11 takes longer than they do (CMakeLists.txt).

#include "../field_attention.cpp"
#include "../gru.cpp"
