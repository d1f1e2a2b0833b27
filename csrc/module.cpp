// The Python module of the kernels. Each file binds its own.

#include <pybind11/pybind11.h>

#include <string>

#include "isa.h"

namespace py = pybind11;

void bind_addresses(py::module_& m);
void bind_bag_gradients(py::module_& m);
void bind_embedding_bags(py::module_& m);
void bind_cross(py::module_& m);
void bind_cublaslt(py::module_& m);
void bind_compressed_interaction(py::module_& m);
void bind_dot_interaction(py::module_& m);
void bind_field_attention(py::module_& m);
void bind_fm_interaction(py::module_& m);
void bind_gru(py::module_& m);
void bind_id_table(py::module_& m);
void bind_initial_rows(py::module_& m);
void bind_known_calls(py::module_& m);
void bind_layers(py::module_& m);
void bind_pair_products(py::module_& m);
void bind_row_group(py::module_& m);
void bind_row_lots(py::module_& m);
void bind_row_update(py::module_& m);
void bind_same(py::module_& m);
void bind_tensor_attributes(py::module_& m);
void bind_watched_dicts(py::module_& m);
void bind_wire(py::module_& m);
void bind_small_mlp(py::module_& m);
void bind_torch_draws(py::module_& m);
void bind_gated_sums(py::module_& m);
void bind_dice(py::module_& m);
void bind_batch_norm(py::module_& m);
void bind_gated_activation(py::module_& m);
void bind_rms_norm(py::module_& m);
void bind_cross_entropy(py::module_& m);
void bind_silu_attention(py::module_& m);

namespace {

recast::Isa isa_named(const std::string& name) {
  if (name == "portable") return recast::Isa::portable;
  if (name == "avx2") return recast::Isa::avx2;
  if (name == "avx512") return recast::Isa::avx512;
  throw py::value_error("unknown instruction set '" + name + "': portable, avx2 or avx512");
}

const char* name_of(recast::Isa isa) {
  if (isa == recast::Isa::avx512) return "avx512";
  return isa == recast::Isa::avx2 ? "avx2" : "portable";
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CPU kernels of Recast.";
  m.def("isa", [] { return name_of(recast::isa()); });
  m.def("has_isa", [](const std::string& name) { return recast::has(isa_named(name)); });
  m.def("set_isa", [](const std::string& name) {
    const recast::Isa wanted = isa_named(name);
    if (!recast::has(wanted)) throw py::value_error("this machine has no " + name);
    recast::isa() = wanted;
  });
#if defined(_OPENMP)
  m.attr("threads") = true;
#else
  m.attr("threads") = false;
#endif
  bind_addresses(m);
  bind_bag_gradients(m);
  bind_embedding_bags(m);
  bind_cross(m);
  bind_cublaslt(m);
  bind_compressed_interaction(m);
  bind_dot_interaction(m);
  bind_field_attention(m);
  bind_fm_interaction(m);
  bind_gru(m);
  bind_id_table(m);
  bind_initial_rows(m);
  bind_known_calls(m);
  bind_layers(m);
  bind_pair_products(m);
  bind_row_group(m);
  bind_row_lots(m);
  bind_row_update(m);
  bind_same(m);
  bind_tensor_attributes(m);
  bind_watched_dicts(m);
  bind_wire(m);
  bind_small_mlp(m);
  bind_torch_draws(m);
  bind_gated_sums(m);
  bind_dice(m);
  bind_batch_norm(m);
  bind_gated_activation(m);
  bind_rms_norm(m);
  bind_cross_entropy(m);
  bind_silu_attention(m);
}
