// Thin wrappers around the instructions that the tensor-core kernels are made of. All
// exist on sm_90 and sm_120.

#ifndef KDTREE_JAX_MMA_CUH_
#define KDTREE_JAX_MMA_CUH_

#include <cstdint>

namespace kdtree_jax {

// Address of shared memory as the instructions below take it.
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 tiles of 16-bit values; lane l gives the row address of tile l / 8.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4],
                                                      uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void LoadMatrix2(uint32_t& r0, uint32_t& r1,
                                            uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address));
}

__device__ __forceinline__ void LoadMatrix2Transposed(uint32_t& r0, uint32_t& r1,
                                                      uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(address));
}

// d += a [16, 16] * b [16, 8], bf16 products in fp32.
__device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Barriers in shared memory that count arrivals.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// To be called before the barrier's place is used for another.
__device__ __forceinline__ void EndBarrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// One arrival, once all copies that this thread has started have ended.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier)
               : "memory");
}

// Waits for the end of the barrier's phase of this parity.
__device__ __forceinline__ void WaitForPhase(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for a warp of which lane 0 alone has waited for the phases before. The others
// wait when this one has ended: what they do next is behind it for racecheck too.
__device__ __forceinline__ void WaitAsWarp(uint32_t barrier, int parity) {
  if (threadIdx.x % 32 == 0) WaitForPhase(barrier, parity);
  __syncwarp();
  WaitForPhase(barrier, parity);
}

// To stand between loads from shared memory and an arrival that lets others overwrite
// it. An arrival does not wait for loads before it, as they go another way: while other
// warps kept that way busy, bytes were seen to be overwritten first, and by copies from
// memory at that. A use of the loaded values does wait; here it has no effect.
template <typename T, int kCount>
__device__ __forceinline__ void WaitForLoads(const T (&loaded)[kCount]) {
  static_assert(sizeof(T) == 4, "values of one register");
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    all ^= *reinterpret_cast<const uint32_t*>(&loaded[i]);
  }
  asm volatile(
      "{\n"
      ".reg .pred rare;\n"
      "setp.eq.u32 rare, %0, 0x9e3779b9;\n"
      "@rare nanosleep.u32 0;\n"
      "}\n" ::"r"(all)
      : "memory");
}

// Starts a copy of 16 bytes to shared memory, or of zeros where `wanted` is false.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global,
                                            bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
}

// The same, and nothing at all where `run` is false; without a branch.
__device__ __forceinline__ void CopyAsync16If(bool run, uint32_t shared,
                                              const void* global, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred run;\n"
      "setp.ne.b32 run, %0, 0;\n"
      "@run cp.async.cg.shared.global [%1], [%2], 16, %3;\n"
      "}\n" ::"r"(static_cast<int>(run)),
      "r"(shared), "l"(global), "r"(wanted ? 16 : 0)
      : "memory");
}

// 2 ** x, 2 units in the last place, results below 2**-126 are 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two fp32 values as bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t PackBFloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace kdtree_jax

#endif  // KDTREE_JAX_MMA_CUH_
