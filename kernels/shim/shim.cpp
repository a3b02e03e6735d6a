// libvolley_shim.so: every kernel of this folder, launched by name on the CPU. Each .cu is compiled on its own
// (scripts/shim.sh) and registers its kernels as the library is opened.
#include "launch.h"

extern "C" __attribute__((visibility("default"))) int volley_shim_launch(const char* name, unsigned grid_x,
                                                                         unsigned grid_y, unsigned grid_z,
                                                                         unsigned block, unsigned shared_bytes,
                                                                         const void* params, unsigned params_bytes) {
  return shim_launch(name, {grid_x, grid_y, grid_z}, block, shared_bytes, params, params_bytes);
}
// Calls visit for each kernel, in order of names.
extern "C" __attribute__((visibility("default"))) void volley_shim_kernels(
    void (*visit)(void* context, const char* name, unsigned max_threads, unsigned params_bytes), void* context) {
  for (const auto& k : cpu::kernels())
    visit(context, k.first.c_str(), k.second.max_threads, (unsigned)k.second.params_bytes);
}
