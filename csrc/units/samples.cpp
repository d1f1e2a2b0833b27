// Layers of samples, compiled at once: pybind11 takes longer than they do (CMakeLists.txt).

#include "../batch_norm.cpp"
#include "../dice.cpp"
#include "../gated_activation.cpp"
#include "../rms_norm.cpp"
