// Layers of samples, masks and codecs, compiled at once: pybind11 takes longer than they do
// (CMakeLists.txt).

#include "../batch_norm.cpp"
#include "../cross.cpp"
#include "../cross_entropy.cpp"
#include "../dice.cpp"
#include "../gated_activation.cpp"
#include "../rms_norm.cpp"
#include "../small_mlp.cpp"
#include "../torch_draws.cpp"
#include "../wire.cpp"
