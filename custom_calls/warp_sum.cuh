// The sum over the lanes of a warp, in one order.

#ifndef KDTREE_JAX_WARP_SUM_CUH_
#define KDTREE_JAX_WARP_SUM_CUH_

namespace kdtree_jax {

// The same in every lane; all lanes take part. Each addition is rounded.
__device__ inline float WarpSum(float sum) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
  }
  return sum;
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_WARP_SUM_CUH_
