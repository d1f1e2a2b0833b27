// Dense layers, masks and codecs, compiled at once: pybind11 takes longer than they do
// (CMakeLists.txt).

#include "../cross.cpp"
#include "../small_mlp.cpp"
#include "../torch_draws.cpp"
#include "../wire.cpp"
