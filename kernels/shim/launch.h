// Starts kernels by name under the CPU shim: what cuLaunchKernel is on a GPU. shim.cpp makes it the one entry point of libvolley_shim.so (built by
// scripts/shim.sh), which a Rust test opens and calls with the same params structs; the C++ tests call it through test.h.
#pragma once
#include <mutex>
#include "cuda_cpu.h"

// Runs kernel `name` to its end. params points to the kernel's params struct of params_bytes bytes. Returns 0, or: 1 no such kernel, 2 another size of
// params, 3 more threads than the kernel is compiled for. Faults inside a kernel (a deadlock, a stray barrier) abort with a message.
inline int shim_launch(const char* name, uint3 grid, unsigned block, unsigned shared_bytes, const void* params, unsigned params_bytes) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> hold(one_at_a_time);
  const auto found = cpu::kernels().find(name);
  if (found == cpu::kernels().end()) return 1;
  const cpu::Kernel& k = found->second;
  if (k.params_bytes != params_bytes) return 2;
  if (block > k.max_threads) return 3;
  cpu::kernel_name = found->first.c_str();
  cpu::launch(dim3(grid.x, grid.y, grid.z), dim3(block), shared_bytes, [&] { k.call(params); });
  return 0;
}
