// Thin wrappers around the copy engine, its barriers, and clusters of blocks. All exist on
// sm_90 and sm_120.

#ifndef KDTREE_JAX_BULK_COPY_CUH_
#define KDTREE_JAX_BULK_COPY_CUH_

#include <cuda.h>

#include <cstdint>

namespace kdtree_jax {

// One arrival at a barrier in shared memory.
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Lanes of a warp that arrive for it: one, behind __syncwarp. For compute-sanitizer's
// racecheck all can be made to, see docs/kdtr_check.md.
#ifdef KDT_EVERY_LANE_ARRIVES
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

// A warp's arrival, as kArrivingLanes, after what its lanes have done before.
__device__ __forceinline__ void ArriveAsWarp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kArrivingLanes) Arrive(barrier);
}

// One arrival, and `bytes` that the copy engine has to bring before the phase ends.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Makes initialised barriers known to the copy engine and to other blocks.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What is read once should not drive out of the L2 what is read again.
__device__ __forceinline__ uint64_t EvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t EvictNormal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` consecutive bytes, a multiple of 16, between addresses of 16.
__device__ __forceinline__ void CopyBulk(uint32_t shared, const void* global,
                                         uint32_t bytes, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to the same place in all `blocks` of the cluster; each one's barrier is told.
__device__ __forceinline__ void CopyBulkToAll(uint32_t shared, const void* global,
                                              uint32_t bytes, uint32_t barrier,
                                              uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}

// Copies to the same place in block `rank` of the cluster, and tells its barrier that lies
// where this block has `barrier`.
__device__ __forceinline__ void CopyBulkToBlock(uint32_t shared, uint32_t bytes,
                                                uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 to, told;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 told, %2, %3;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[to], [%0], %1, [told];\n}" ::"r"(shared),
      "r"(bytes), "r"(barrier), "r"(rank)
      : "memory");
}

// Copies from shared memory, and waits until it is done.
__device__ __forceinline__ void StoreBulk(void* global, uint32_t shared,
                                          uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n"
      "cp.async.bulk.wait_group 0;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

// The copy engine sees what this thread knows to be in memory.
__device__ __forceinline__ void FenceForCopies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Copies the box of a tensor map whose first element is (i0, i1, i2).
__device__ __forceinline__ void CopyBox(uint32_t shared, const CUtensorMap* map, int i0,
                                        int i1, int i2, uint32_t barrier,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(map), "r"(i0), "r"(i1), "r"(i2), "r"(barrier), "l"(policy)
      : "memory");
}

// A barrier of all threads of a cluster; what was written before is seen after it.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Four floats of the shared memory of another block of the cluster, at the address where
// this block has its own.
__device__ __forceinline__ float4 LoadOfBlock(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared), "r"(rank));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// A barrier of some warps of a block.
__device__ __forceinline__ void WarpsSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_BULK_COPY_CUH_
