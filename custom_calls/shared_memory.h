// How much dynamic shared memory the kernels are launched with at most. A compiled
// kernel does not tell, so each says it here, and `kdtree_jax_build_info` lists it.

#ifndef KDTREE_JAX_SHARED_MEMORY_H_
#define KDTREE_JAX_SHARED_MEMORY_H_

namespace kdtree_jax {

// What a block may have on sm_120, static and dynamic together. sm_90 has 227 KB.
constexpr int kMostSharedMemory = 99 * 1024;

// What a block of a kernel for sm_90a alone may have.
constexpr int kMostSharedMemoryOfHopper = 227 * 1024;

// A list of all kernels with dynamic shared memory, made when the library is loaded.
struct DynamicSharedMemory {
  DynamicSharedMemory(const char* kernel, int bytes)
      : kernel(kernel), bytes(bytes), next(first) {
    first = this;
  }

  const char* kernel;
  int bytes;
  const DynamicSharedMemory* next;

  static inline const DynamicSharedMemory* first = nullptr;
};

}  // namespace kdtree_jax

// To stand once, in namespace kdtree_jax, for each kernel with `extern __shared__`;
// for a template: its name and the most that any instance gets. The assertion sees the
// dynamic part alone; the sum with the static part is checked in binary_test.py.
#define KDT_DYNAMIC_SHARED_MEMORY(kernel, most_bytes)                       \
  static_assert((most_bytes) <= kMostSharedMemory, "more than sm_120 has"); \
  static const DynamicSharedMemory shared_memory_of_##kernel(#kernel, most_bytes)

// The same for a kernel for sm_90a alone, which is empty on others.
#define KDT_HOPPER_SHARED_MEMORY(kernel, most_bytes)                              \
  static_assert((most_bytes) <= kMostSharedMemoryOfHopper, "more than sm_90 has"); \
  static const DynamicSharedMemory shared_memory_of_##kernel(#kernel, most_bytes)

#endif  // KDTREE_JAX_SHARED_MEMORY_H_
