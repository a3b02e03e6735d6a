// Starts kernels by name under the CPU shim: what cuLaunchKernel is on a GPU. shim.cpp makes it the one entry point of
// libvolley_shim.so (built by scripts/shim.sh), which a Rust test opens and calls with the same params structs; the C++
// tests call it through test.h.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include "cuda_cpu.h"

// Runs kernel `name` to its end. params points to the kernel's params struct of params_bytes bytes. Returns 0, or: 1 no
// such kernel, 2 another size of params, 3 more threads than the kernel is compiled for. Faults inside a kernel (a
// deadlock, a stray barrier) abort with a message. A collective waits for the launches of its other ranks, from other
// threads, and all run together; after 20 s, or when its rank is poisoned, without them.
inline int shim_launch(const char* name, uint3 grid, unsigned block, unsigned shared_bytes, const void* params,
                       unsigned params_bytes) {
  struct Arrival {
    cpu::Grid grid;
    bool done;
  };
  static std::mutex one_at_a_time;
  static std::condition_variable arrived;
  static std::map<const void*, std::vector<Arrival*>> groups;
  std::unique_lock<std::mutex> hold(one_at_a_time);
  const auto found = cpu::kernels().find(name);
  if (found == cpu::kernels().end()) return 1;
  const cpu::Kernel& k = found->second;
  if (k.params_bytes != params_bytes) return 2;
  if (block > k.max_threads) return 3;
  if (const cpu::Group group = k.group ? k.group(params) : cpu::Group{}; group.ranks > 1) {
    Arrival mine{{found->first.c_str(), dim3(grid.x, grid.y, grid.z), block, [&] { k.call(params); }}, false};
    std::vector<Arrival*>& all = groups[group.id];
    all.push_back(&mine);
    for (int tick = 0;
         !mine.done && (int)all.size() < group.ranks && tick < 2000 && *(const volatile unsigned*)group.poison == 0;
         tick++)
      arrived.wait_for(hold, std::chrono::milliseconds(10));
    if (!mine.done) {
      std::vector<std::vector<cpu::Grid>> streams;
      for (Arrival* a : all) streams.push_back({a->grid});
      cpu::run_together(streams);
      for (Arrival* a : all) a->done = true;
      all.clear();
      arrived.notify_all();
    }
    return 0;
  }
  cpu::kernel_name = found->first.c_str();
  cpu::launch(dim3(grid.x, grid.y, grid.z), dim3(block), shared_bytes, [&] { k.call(params); });
  return 0;
}
