// Sums and products of rows, compiled at once: pybind11 takes longer than they do (CMakeLists.txt).

#include "../compressed_interaction.cpp"
#include "../dot_interaction.cpp"
#include "../fm_interaction.cpp"
#include "../gated_sums.cpp"
#include "../pair_products.cpp"
