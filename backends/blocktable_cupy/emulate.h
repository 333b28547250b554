// What the host's C++ compiler needs to run kernels.cu: the CUDA words as plain C++, and a launch that walks the grid.
// Threads run one after another, which the kernels allow: none waits for another.

#include <cstddef>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__

struct int4 {
  int x, y, z, w;
};
struct longlong2 {
  long long x, y;
};
static inline int atomicMax(int* place, int value) {
  int old = *place;
  if (value > old) *place = value;
  return old;
}
static inline int atomicExch(int* place, int value) {
  int old = *place;
  *place = value;
  return old;
}
static inline int atomicAdd(int* place, int value) {
  *place += value;
  return *place - value;
}
static inline void atomicAdd(unsigned* place, unsigned value) { *place += value; }
static inline void atomicMin(unsigned* place, unsigned value) {
  if (value < *place) *place = value;
}
static inline void __threadfence_system() {}
static inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }

struct Index3 {
  unsigned x, y, z;
};
static thread_local Index3 gridDim, blockDim, blockIdx, threadIdx;

template <typename... Args, std::size_t... Place>
static void call(void (*kernel)(Args...), void** arguments, std::index_sequence<Place...>) {
  kernel(*static_cast<Args*>(arguments[Place])...);
}

// As cuLaunchKernel: `arguments[i]` is the address of the i-th argument.
template <typename... Args>
static void launch(void (*kernel)(Args...), unsigned grid_x, unsigned grid_y, unsigned block_x, void** arguments) {
  gridDim = {grid_x, grid_y, 1};
  blockDim = {block_x, 1, 1};
  for (unsigned y = 0; y < grid_y; ++y)
    for (unsigned x = 0; x < grid_x; ++x)
      for (unsigned thread = 0; thread < block_x; ++thread) {
        blockIdx = {x, y, 0};
        threadIdx = {thread, 0, 0};
        call(kernel, arguments, std::index_sequence_for<Args...>{});
      }
}

#define EMULATE(kernel)                                                                                      \
  extern "C" void launch_##kernel(unsigned grid_x, unsigned grid_y, unsigned block_x, void** arguments) {    \
    launch(kernel, grid_x, grid_y, block_x, arguments);                                                      \
  }
