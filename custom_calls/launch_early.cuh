// Kernels that start before the one launched before them on the stream has ended.

#ifndef KDTREE_JAX_LAUNCH_EARLY_CUH_
#define KDTREE_JAX_LAUNCH_EARLY_CUH_

namespace kdtree_jax {

// Of kernels launched with programmatic stream serialization: waits until the kernel before
// has ended and what it wrote is seen. Returns at once in others.
__device__ __forceinline__ void WaitForKernelBefore() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be started, once all blocks have come here or ended.
__device__ __forceinline__ void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_LAUNCH_EARLY_CUH_
